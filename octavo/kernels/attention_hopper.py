"""Paged attention for sm_90: a persistent, warp-specialised kernel.

A CTA is three warpgroups. Two attend: each owns 64 of an item's 128 rows. The third loads: its warps 0 and 1 bring work
items, Q and K, its warps 2 and 3 bring V. They meet at rings of buffers in shared memory, and nowhere else.
"""

from octavo.kernels import hopper_ptx as ptx
from octavo.kernels.gluon_compat import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    partition_barrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from octavo.kernels.hopper_combine import combine_states, ends_last, store_state
from octavo.kernels.hopper_program import (
    ATTENDING_WARPS,
    BLOCK_M,
    FULL_END,
    HEADER_WORDS,
    ITEM_WORDS,
    ITEMS_TAKEN,
    KEY_BEGIN,
    KEY_END,
    KV_HEAD,
    KV_LEN,
    LAZY_BITS,
    LINE,
    LOADING_THREADS,
    NUM_ITEMS,
    NUM_SPLITS,
    Q_LEN,
    Q_START,
    ROW_BEGIN,
    ROW_COUNT,
    ROWS,
    RUNS_IN_PAGE,
    RUNS_NEVER,
    THERE,
    TINY_SCALE,
    UNIT,
    WARPGROUPS,
    WARPS,
    Cache,
    Config,
    Program,
    packed_rows,
)

# Loading


@gluon.jit
def publish_item(p, n, index, num_items, enabled, IS_INSIDE: gl.constexpr):
    """An enabled warp: bring item `index`, or word that none is left, to the CTA as its n-th.

    IS_INSIDE: the plan has room for the item, so it may be read before num_items has come.
    """
    word = ptx.lane() % ITEM_WORDS
    there = index < num_items
    value = gl.load(p.plan + (HEADER_WORDS + index.to(gl.int64) * ITEM_WORDS + word), mask=there | IS_INSIDE, other=0)
    value = gl.where(word == THERE, gl.where(there, index + 1, 0), value)
    p.items.acquire(n)
    ptx.store_words_and_arrive(p.config.WORDS, p.item(n).offset + 4 * word, value, p.items.FULL, 8 * p.items.stage(n),
                               enabled)  # fmt: skip


@gluon.jit
def load_queries(p, item, n, thread):
    C = p.config
    if item.num_blocks(C) > 0:
        for half in gl.static_range(WARPGROUPS):
            row = item.word(ROW_BEGIN) + half * ROWS + thread
            # Rows past the sequence's last repeat its last token; they are never stored.
            token = item.word(Q_START) + gl.minimum(row // C.GROUP, item.word(Q_LEN) - 1)
            head = item.word(KV_HEAD) * C.GROUP + row % C.GROUP
            unit = gl.minimum(token, p.num_tokens - 1) * p.q_token_stride + head * p.q_head_stride
            to = p.items.stage(n) * (WARPGROUPS * C.Q_TILE_BYTES) + (thread & ptx.WARP) * ptx.SWIZZLE_BYTES
            ptx.gather_rows(unit, p.q.to(gl.int64), half * C.Q_TILE_BYTES, to, C.D // 64, ROWS * ptx.SWIZZLE_BYTES)
    p.queries.fill_when_copied(n)


@gluon.jit
def cache_row(p, table, key, begin, end):
    """Row of the caches that holds a key: page id * page_size + place in the page. None is read before begin.

    Keys past the last repeat it: what lies there must not be read, since 0 * NaN is NaN. A bad page id is clamped.
    """
    PAGE_SIZE: gl.constexpr = p.config.PAGE_SIZE
    safe = gl.minimum(key, end - 1)
    page = gl.load(table + safe // PAGE_SIZE, mask=key >= begin, other=0)
    page = gl.minimum(gl.maximum(page, 0), p.num_pages - 1).to(gl.int32)
    return page * PAGE_SIZE + safe % PAGE_SIZE


@gluon.jit
def load_rows(p, cache, ring, count, base, head, row, PLACE: gl.constexpr, offset):
    """A warp's 32 rows of a tile: by TMA where BOX_ROWS at a time run consecutively in memory, else one by one."""
    C = p.config
    BLOCKS: gl.constexpr = C.D // 64
    BLOCK_BYTES: gl.constexpr = C.BLOCK_N * ptx.SWIZZLE_BYTES
    if C.RUNS == RUNS_NEVER:
        ptx.gather_rows(cache.unit(row, C), base, PLACE, offset, BLOCKS, BLOCK_BYTES)
        ring.fill_when_copied(count)
    elif ptx.consecutive(row, C.BOX_ROWS) != 0:
        place, page = row, 0
        if C.RUNS == RUNS_IN_PAGE:
            place, page = row % C.PAGE_SIZE, row // C.PAGE_SIZE
        ptx.load_boxes(cache.tensor_map, place, head, page, C.BOX_ROWS, PLACE, offset, ring.FULL, 8 * ring.stage(count),
                       BLOCKS, BLOCK_BYTES)  # fmt: skip
    else:
        ptx.gather_rows(cache.unit(row, C), base, PLACE, offset, BLOCKS, BLOCK_BYTES)
        ring.fill_when_copied(count)


@gluon.jit
def load_blocks(p, item, n, cache, ring, TILES: gl.constexpr, first, thread, WITH_QUERIES: gl.constexpr):
    """K or V of an item's keys, last block first, into the ring from count `first` on. Returns the count after them.

    64 threads bring 64 rows at once. Page ids are read one block ahead of the copies that need them; the item's
    queries, WITH_QUERIES, while the first ones come.
    """
    C = p.config
    num_blocks = item.num_blocks(C)
    begin = item.word(KEY_BEGIN)
    end = item.word(KEY_END)
    head = item.word(KV_HEAD)
    table = p.page_table + item.position()
    base = cache.pointer + head.to(gl.int64) * cache.head_stride * 16
    key = begin + (num_blocks - 1) * C.BLOCK_N + thread
    upper = cache_row(p, table, key, begin, end)
    lower = upper + 0
    if C.BLOCK_N == 128:
        lower = cache_row(p, table, key + 64, begin, end)
    if WITH_QUERIES:
        load_queries(p, item, n, thread)
    for block in range(num_blocks):
        count = first + block
        key -= C.BLOCK_N
        next_upper = cache_row(p, table, key, begin, end)
        next_lower = next_upper + 0
        if C.BLOCK_N == 128:
            next_lower = cache_row(p, table, key + 64, begin, end)
        to = ring.stage(count) * C.KV_TILE_BYTES + (thread & ptx.WARP) * ptx.SWIZZLE_BYTES
        ring.acquire(count)
        load_rows(p, cache, ring, count, base, head, upper, TILES, to)
        if C.BLOCK_N == 128:
            load_rows(p, cache, ring, count, base, head, lower, TILES + 64 * ptx.SWIZZLE_BYTES, to)
        upper = next_upper
        lower = next_lower
    return first + num_blocks


@gluon.jit
def load(p):
    """The loading warpgroup."""
    warp = ptx.warp() & 3
    thread = (warp & 1) * ptx.WARP + ptx.lane()
    num_items = gl.load(p.plan + NUM_ITEMS)
    if p.config.RUNS != RUNS_NEVER:
        ptx.acquire_tensor_map(p.k_cache.tensor_map)
        ptx.acquire_tensor_map(p.v_cache.tensor_map)
    n = gl.to_tensor(0)
    count = 0
    if warp < 2:
        # Warp 0 draws items; warp 1 goes through the same motions, which branches less and lets the compiler see that
        # both agree.
        draws = (warp == 0).to(gl.int32)
        publish_item(p, n, gl.program_id(0), num_items, draws, True)
        while p.has_item(n):
            item = p.item(n)
            count = load_blocks(p, item, n, p.k_cache, p.keys, p.config.KEYS, count, thread, True)
            p.items.release(n)
            n += 1
            # Each CTA that had an item draws until it draws one too many: num_items numbers in all.
            number = ptx.take_number((p.plan + ITEMS_TAKEN).to(gl.int64), num_items - 1, draws)
            publish_item(p, n, gl.num_programs(0) + number, num_items, draws, False)
    else:
        while p.has_item(n):
            item = p.item(n)
            count = load_blocks(p, item, n, p.v_cache, p.values, p.config.VALUES, count, thread, False)
            p.items.release(n)
            n += 1
    ptx.finish_copies()


# Attending


# Running maxima m and sums l are [ROWS, 4]: a row's scores lie in four threads. m is the same in all of them, l is each
# thread's own part, summed up at the end.


@gluon.jit
def by_thread(s):
    """[ROWS, keys] as [ROWS, keys / 8, 4 threads, 2]."""
    return s.reshape([s.shape[0], s.shape[1] // 8, 4, 2])


@gluon.jit
def top_scores(s):
    """[ROWS, 4]: the largest of each thread's scores."""
    return gl.max(gl.max(by_thread(s), 3), 1)


@gluon.jit
def raise_maximum(m, l, top, scale):
    """(m, l, alpha) for the maximum of m and all scores; alpha = 2^(old m - new m) is what earlier sums lose."""
    row_top = gl.convert_layout(gl.max(top, 1), gl.SliceLayout(1, m.type.layout), assert_trivial=True)
    m_new = gl.maximum(m, row_top[:, None] * scale)
    alpha = gl.exp2(m - gl.where(m_new == float("-inf"), 0.0, m_new))
    return m_new, l * alpha, alpha


@gluon.jit
def exponentials(s, m, l, scale):
    """(2^(s scale - m), l with them added); m = -inf counts as 0."""
    safe = gl.where(m == float("-inf"), 0.0, m)
    p = gl.exp2(by_thread(s) * scale - safe[:, None, :, None])
    return p.reshape(s.shape), l + gl.sum(gl.sum(p, 3), 1)


@gluon.jit
def mask_keys(s, first_key, limit):
    """Scores of keys from `limit` on become -inf. A thread's keys differ by constants, which take no registers."""
    x = by_thread(s)
    GROUPS: gl.constexpr = gl.SliceLayout(3, x.type.layout)
    bound = gl.convert_layout(limit - first_key, gl.SliceLayout(1, gl.SliceLayout(1, GROUPS)), assert_trivial=True)
    bound = bound[:, None] - 2 * gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, GROUPS)))[None, :]
    group = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, gl.SliceLayout(2, GROUPS)))
    pair = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, x.type.layout))))
    keys = 8 * group[None, :, None, None] + pair[None, None, None, :]
    return gl.where(keys < bound[:, None, :, None], x, float("-inf")).reshape(s.shape)


@gluon.jit
def accumulator_rows(p):
    """[ROWS], of a warpgroup's scores."""
    return ptx.accumulator_rows(gl.zeros([ROWS], gl.int32, gl.SliceLayout(1, p.config.S_LAYOUT)))


@gluon.jit
def store_lse(p, item, first, values):
    token, head = packed_rows(p, item, first + accumulator_rows(p))
    row = item.word(Q_START) + token
    offset = row * p.lse_token_stride + head * p.lse_head_stride
    gl.store(p.lse + offset, values, mask=(token < item.word(Q_LEN)) & (row < p.num_tokens))


@gluon.jit
def store_out(p, item, first, values, LAYOUT: gl.constexpr):
    rows = ptx.copy_rows(gl.zeros([ROWS], gl.int32, gl.SliceLayout(1, LAYOUT)), p.config.D // 8)
    token, head = packed_rows(p, item, first + rows)
    row = item.word(Q_START) + token
    unit = row * p.out_token_stride + head * p.out_head_stride
    offset = unit.to(gl.uint32).to(gl.int64) * UNIT
    columns = gl.arange(0, p.config.D, layout=gl.SliceLayout(0, LAYOUT))
    inside = (token < item.word(Q_LEN)) & (row < p.num_tokens)
    gl.store(p.out + (offset[:, None] + columns[None, :]), values, mask=inside[:, None])


@gluon.jit
def negate(tile, LAYOUT: gl.constexpr):
    """A negative scale would turn the running maximum into a minimum: negating Q is exact."""
    tile.store(-tile.load(LAYOUT))
    fence_async_shared()
    partition_barrier()


@gluon.jit
def score(p, q, count):
    """Start Q K^T of key block `count`."""
    C = p.config
    zeros = gl.zeros([ROWS, C.BLOCK_N], gl.float32, C.S_LAYOUT)
    return warpgroup_mma(q, p.key_tile(count).permute([1, 0]), zeros, use_acc=False, is_async=True)


@gluon.jit
def attend_block(p, q, count, is_last, state, scale, first_key, limit, flag, MASKED: gl.constexpr):
    """Scores of key block `count` while the block before is being summed up. Returns the new (weights, acc, m, l).

    m is raised only where a score lies more than LAZY_BITS above it: whatever m is, it cancels in out and in lse. So
    the four threads of a row need not exchange their maxima in most blocks.
    """
    C = p.config
    weights, acc, m, l = state
    s = score(p, q, count)
    p.values.wait_full(count - 1)
    if C.FENCE:
        fence_async_shared()
    acc = warpgroup_mma(weights, p.value_tile(count - 1), acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    p.keys.release(count)
    if MASKED:
        s = mask_keys(s, first_key, limit)
    top = top_scores(s)
    ptx.flag_if_above(top * scale - m, LAZY_BITS, C.FLAGS, flag)
    # The branch keeps the compiler from moving the wait for P V above the maxima.
    if not is_last:
        p.keys.wait_full(count + 1)
        if C.FENCE:
            fence_async_shared()
    is_raised = ptx.load_word(C.FLAGS, flag) != 0
    alpha = m + 0.0
    if is_raised:
        m, l, alpha = raise_maximum(m, l, top, scale)
    probabilities, l = exponentials(s, m, l, scale)
    rounded = gl.convert_layout(probabilities.to(C.dtype), weights.type.layout)
    acc, weights, rounded, l, alpha = warpgroup_mma_wait(0, deps=[acc, weights, rounded, l, alpha])
    p.values.release(count - 1)
    if is_raised:
        acc = acc * gl.convert_layout(gl.max(alpha, 1), gl.SliceLayout(1, C.O_LAYOUT))[:, None]
    return rounded, acc, m, l


@gluon.jit
def attend_item(p, item, n, first, scale, flag, WG: gl.constexpr):
    """64 rows over an item's keys, the last block first; `first` key blocks came before."""
    C = p.config
    ROW: gl.constexpr = gl.SliceLayout(1, C.S_LAYOUT)
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // C.D, C.D // 8], [4, 1], [1, 0])
    num_blocks = item.num_blocks(C)
    begin = item.word(KEY_BEGIN)
    num_full = gl.maximum(item.word(FULL_END) - begin, 0) // C.BLOCK_N
    limit = gl.zeros([ROWS], gl.int32, ROW) + item.word(KEY_END)
    if C.CAUSAL:
        token, _ = packed_rows(p, item, WG * ROWS + accumulator_rows(p))
        limit = gl.minimum(limit, token + (item.word(KV_LEN) - item.word(Q_LEN) + 1))
    q = p.query_tile(n, WG)
    p.queries.wait_full(n)
    if C.SIGNED:  # noqa: SIM102 (decided when it is compiled)
        if p.scale < 0:
            negate(q, COPY)
    fence_async_shared()

    p.keys.wait_full(first)
    if C.FENCE:
        fence_async_shared()
    s = warpgroup_mma_wait(0, deps=[score(p, q, first)])
    p.keys.release(first)
    s = mask_keys(s, begin + (num_blocks - 1) * C.BLOCK_N, limit)
    L4: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, by_thread(s).type.layout))
    m = gl.full([ROWS, 4], float("-inf"), gl.float32, L4)
    m, l, _ = raise_maximum(m, gl.zeros([ROWS, 4], gl.float32, L4), top_scores(s), scale)
    probabilities, l = exponentials(s, m, l, scale)
    weights = gl.convert_layout(probabilities.to(C.dtype), gl.DotOperandLayout(0, C.O_LAYOUT, 2))
    state = (weights, gl.zeros([ROWS, C.D], gl.float32, C.O_LAYOUT), m, l)
    if num_blocks > 1:
        p.keys.wait_full(first + 1)
    if C.FENCE:
        fence_async_shared()
    masked_end = gl.maximum(num_blocks - num_full, 1)
    for step in range(1, masked_end):
        block = num_blocks - 1 - step
        state = attend_block(p, q, first + step, block == 0, state, scale,
                             begin + block * C.BLOCK_N, limit, flag, True)  # fmt: skip
    for step in range(masked_end, num_blocks):
        state = attend_block(p, q, first + step, step + 1 == num_blocks, state, scale, 0, limit, flag,
                             False)  # fmt: skip
    weights, acc, m, l = state
    last = first + num_blocks - 1
    p.values.wait_full(last)
    if C.FENCE:
        fence_async_shared()
    acc = warpgroup_mma(weights, p.value_tile(last), acc, is_async=True)
    total = gl.convert_layout(gl.sum(l, 1), ROW)
    empty = total == 0.0
    inverse = gl.where(empty, 0.0, 1.0 / gl.where(empty, 1.0, total))
    peak = gl.convert_layout(gl.max(m, 1), ROW)
    lse = gl.where(empty, float("-inf"), peak + gl.log2(gl.where(empty, 1.0, total)))
    acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
    p.values.release(last)
    result = acc * gl.convert_layout(inverse, gl.SliceLayout(1, C.O_LAYOUT))[:, None]
    if C.CUTS:
        if item.word(NUM_SPLITS) > 1:
            store_part(p, item, q, result, lse, WG)
        else:
            store_tile(p, item, q, result, lse, WG)
    else:
        store_tile(p, item, q, result, lse, WG)


@gluon.jit
def store_tile(p, item, q, result, lse, WG: gl.constexpr):
    """Write a warpgroup's rows: through Q's place in shared memory, so that whole rows are written at once."""
    C = p.config
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // C.D, C.D // 8], [4, 1], [1, 0])
    store_lse(p, item, WG * ROWS, lse)
    q.store(result.to(C.dtype))
    store_out(p, item, WG * ROWS, q.load(COPY), COPY)


@gluon.jit
def store_part(p, item, q, result, lse, WG: gl.constexpr):
    """Write a warpgroup's partial state; where it is the last of its tile, the tile's rows from all."""
    ROW: gl.constexpr = gl.SliceLayout(1, p.config.O_LAYOUT)
    rows = WG * ROWS + gl.convert_layout(accumulator_rows(p), ROW)
    store_state(p, item, rows, result, gl.convert_layout(lse, ROW))
    if ends_last(p, item, WG):
        total, total_lse = combine_states(p, item, rows, p.config.O_LAYOUT)
        store_tile(p, item, q, total, gl.convert_layout(total_lse, gl.SliceLayout(1, p.config.S_LAYOUT)), WG)


@gluon.jit
def attend(p, WG: gl.constexpr):
    """An attending warpgroup."""
    C = p.config
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // C.D, C.D // 8], [4, 1], [1, 0])
    scale = p.scale
    if C.SIGNED:
        # The least scale keeps a masked score, -inf, from becoming NaN when the scale is 0.
        scale = gl.maximum(gl.abs(scale), TINY_SCALE)
    flag = 4 * ptx.warp()
    n = 0
    count = 0
    while p.has_item(n):
        item = p.item(n)
        num_blocks = item.num_blocks(C)
        if num_blocks > 0:
            attend_item(p, item, n, count, scale, flag, WG)
            count += num_blocks
        else:
            for tile in range(0, item.word(ROW_COUNT), BLOCK_M):
                no_key = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, C.S_LAYOUT))
                store_lse(p, item, tile + WG * ROWS, no_key)
                store_out(p, item, tile + WG * ROWS, gl.zeros([ROWS, C.D], C.dtype, COPY), COPY)
        # All four warps are done with the item and with Q's place.
        partition_barrier()
        p.items.release(n)
        n += 1


_COUNTS = ("scale_log2 num_tokens num_pages states_begin num_states q_token_stride q_head_stride k_page_stride "
           "k_token_stride k_head_stride v_page_stride v_token_stride v_head_stride out_token_stride out_head_stride "
           "lse_token_stride lse_head_stride")  # fmt: skip


@gluon.jit(do_not_specialize=_COUNTS.split(), do_not_specialize_on_alignment=["plan", "page_table", "lse", "scale"])
def attention_hopper_kernel(
        q, k_cache, v_cache, out, lse, plan, page_table, scale, tensor_maps, scale_log2, num_tokens, num_pages,
        states_begin, num_states, q_token_stride, q_head_stride, k_page_stride, k_token_stride, k_head_stride,
        v_page_stride, v_token_stride, v_head_stride, out_token_stride, out_head_stride, lse_token_stride,
        lse_head_stride,
        GROUP: gl.constexpr, D: gl.constexpr, PAGE_SIZE: gl.constexpr, CAUSAL: gl.constexpr, RUNS: gl.constexpr,
        BOX_ROWS: gl.constexpr, BLOCK_N: gl.constexpr, SLOTS: gl.constexpr, STAGES: gl.constexpr, FENCE: gl.constexpr,
        CUTS: gl.constexpr,
        ATTEND_REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr):  # fmt: skip
    """Grid: CTAs, at most as many as the plan has room for items; each takes items until none is left.

    Strides of lse are in elements, others in 16 bytes. scale_log2 > 0; with a pointer `scale`, times that, of any sign.
    tensor_maps holds the TMA descriptors of K and of V (128 bytes each). Partial states, if tiles have CUTS, lie
    states_begin places after the items' begin.
    """
    config = Config(GROUP, D, PAGE_SIZE, CAUSAL, RUNS, BOX_ROWS, BLOCK_N, SLOTS, STAGES, FENCE, scale is not None, CUTS,
                    q.dtype.element_ty)  # fmt: skip
    LINES: gl.constexpr = config.CONTROL // LINE
    arena = gl.allocate_shared_memory(gl.bfloat16, [LINES, LINE // 2], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if scale is not None:
        scale_log2 *= gl.load(scale)
    maps = tensor_maps.to(gl.int64)
    p = Program(config, arena,
                Cache(k_cache.to(gl.int64), k_page_stride, k_token_stride, k_head_stride, maps),
                Cache(v_cache.to(gl.int64), v_page_stride, v_token_stride, v_head_stride, maps + 128),
                q, out, lse, plan, page_table, scale_log2, num_tokens, num_pages, states_begin, num_states,
                q_token_stride, q_head_stride,
                out_token_stride, out_head_stride, lse_token_stride, lse_head_stride)  # fmt: skip
    # Gluon's own barrier is not used; it shows in the PTX whether arena and control lie where the primitives assume it.
    control = gl.allocate_shared_memory(gl.int64, [LINE // 8, 1], mbarrier.MBarrierLayout())
    mbarrier.init(control.index(0), count=1)
    p.items.initialize(1, WARPS)
    p.queries.initialize(LOADING_THREADS, 1)
    p.keys.initialize(BLOCK_N, ATTENDING_WARPS)
    p.values.initialize(BLOCK_N, ATTENDING_WARPS)
    partition_barrier()
    gl.warp_specialize([(attend, (p, 0)), (attend, (p, 1)), (load, (p,))], [4, 4], [ATTEND_REGISTERS, LOAD_REGISTERS])
    arena._keep_alive()
    control._keep_alive()
