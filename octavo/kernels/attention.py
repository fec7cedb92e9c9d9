"""Portable paged attention: one program computes one work item, a tile of packed query rows against its keys."""

import triton
import triton.language as tl

from octavo.kernels.combine import store_tile
from octavo.kernels.plan import (
    ARRIVED,
    FULL_END,
    HEADER_WORDS,
    ITEM_WORDS,
    KEY_BEGIN,
    KEY_END,
    KV_HEAD,
    KV_LEN,
    NUM_ITEMS,
    NUM_SPLITS,
    PAGE_HIGH,
    PAGE_LOW,
    Q_LEN,
    Q_START,
    ROW_BEGIN,
    ROW_COUNT,
    SEQUENCE,
    SLOT,
    SPLIT,
    find_item,
)
from octavo.kernels.primitives import (
    finish_softmax,
    key_offsets,
    key_pages,
    load_tile,
    online_softmax_step,
    store_rows,
    tile_rows,
)
from octavo.kernels.variants import (
    edge_keys,
    head_scale,
    load_row,
    load_sinks,
    mask_keys,
    start_softmax,
    vary_scores,
    visible_keys,
)


@triton.jit
def attend_keys(state, q, scale, limit, cache, begin, end, key_end, gap, row, masks, MASKED: tl.constexpr,
                SAME_STRIDES: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAGE_SIZE: tl.constexpr,
                BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr, PRECISION: tl.constexpr,
                V: tl.constexpr):  # fmt: skip
    """Fold keys [begin, end) into state (acc, m, l). Row r sees keys below limit[r]; without MASKED it sees them all.

    cache: (K and V of one head, their strides, page table, position of the sequence in it, pages).
    gap: (a key, how many from it on are left out): of a window's MASKED keys, end counts as if they were not there.
    row, masks: as in variants.load_row.
    """
    acc, m, l = state
    k_head, v_head, k_strides, v_strides, page_table, position, num_pages = cache
    d = tl.arange(0, q.shape[1])
    dv = tl.arange(0, acc.shape[1])
    for start in tl.range(begin, end, BLOCK_N, num_stages=NUM_STAGES):
        keys = start + tl.arange(0, BLOCK_N)
        if MASKED and V.LEFT >= 0:
            keys += tl.where(start < gap[0], 0, gap[1])
        # Positions past the item's last key repeat it: what lies there must not be read, and 0 * NaN is NaN.
        safe = tl.minimum(keys, key_end - 1) if MASKED else keys
        pages = key_pages(page_table, position, safe, num_pages, PAGE_SIZE)
        offsets = key_offsets(pages, safe, k_strides, PAGE_SIZE)
        k = load_tile(k_head, offsets, d, D, q.shape[1]).to(q.dtype)
        scores, rest = vary_scores(tl.dot(q, k.T, input_precision=PRECISION), scale, keys, row, V)
        if MASKED:
            scores = mask_keys(scores, keys, limit, row, masks, V)
        p, alpha, m, l = online_softmax_step(scores, rest, m, l)
        if not SAME_STRIDES:
            offsets = key_offsets(pages, safe, v_strides, PAGE_SIZE)
        v = load_tile(v_head, offsets, dv, DV, acc.shape[1]).to(q.dtype)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return acc, m, l


@triton.jit
def load_queries(q_ptr, strides, tokens, heads, inside, scale, SIGNED: tl.constexpr, D: tl.constexpr,
                 D_PADDED: tl.constexpr):  # fmt: skip
    """(q, scale > 0 in base 2) whose product is what was asked for; only SIGNED scales may be negative."""
    d = tl.arange(0, D_PADDED)
    offsets = tokens * strides[0] + heads * strides[1]
    q = tl.load(q_ptr + offsets[:, None] + d[None, :], mask=inside[:, None] & (d[None, :] < D), other=0.0)
    if SIGNED:
        # A negative scale would turn the running maximum into a minimum; -q keeps the product and is exact.
        q = tl.where(scale < 0, -q, q)
    # Not quite zero, as 0 * -inf is NaN for a masked key: 2^(scores 1e-37) is 1 in float32 all the same.
    return q, tl.maximum(tl.abs(scale) * 1.4426950408889634, 1e-37)


@triton.jit
def load_place(item):
    """Volatile, so that the epilogue reads the item again and nothing of it is live in the main loop."""
    return (tl.load(item + ROW_BEGIN, volatile=True), tl.load(item + Q_START, volatile=True),
            tl.load(item + Q_LEN, volatile=True), tl.load(item + KV_HEAD, volatile=True))  # fmt: skip


@triton.jit
def attend_tile(tensors, strides, place, keys, position, kv_len, scale_ptr, sm_scale, num_tokens, num_pages,
                part, sequence, extras, mask_length, GROUP: tl.constexpr, SAME_STRIDES: tl.constexpr,
                D: tl.constexpr, DV: tl.constexpr, D_PADDED: tl.constexpr, DV_PADDED: tl.constexpr,
                PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                NUM_STAGES: tl.constexpr, PRECISION: tl.constexpr, SHORT: tl.constexpr,
                V: tl.constexpr):  # fmt: skip
    """(out, lse) of a tile's rows over keys [begin, end), of which every row sees those below full_end that no variant
    hides from it."""
    q_ptr, k_cache, v_cache, page_table = tensors
    q_strides, k_strides, v_strides = strides
    begin, end, full_end = keys
    token_in_sequence, tokens, heads, inside = tile_rows(place, 0, num_tokens, GROUP, BLOCK_M)
    scale = sm_scale
    if scale_ptr is not None:
        scale *= tl.load(scale_ptr)
    if V.K_SCALE > 0:
        scale *= head_scale(extras[2], place[3], V.K_SCALE)
    SIGNED: tl.constexpr = scale_ptr is not None or V.K_SCALE > 0
    q, scale = load_queries(q_ptr, q_strides, tokens, heads, inside, scale, SIGNED, D, D_PADDED)
    limit = tl.minimum(visible_keys(token_in_sequence, place[2], kv_len, V.RIGHT), end)
    row = load_row(place, kv_len, sequence, token_in_sequence, heads, inside, extras, V)
    masks = (extras[4], mask_length) if V.MASK > 0 else None
    head = place[3].to(tl.int64)
    k_head, v_head = k_cache + head * k_strides[2], v_cache + head * v_strides[2]
    cache = (k_head, v_head, k_strides, v_strides, page_table, position, num_pages)
    acc = tl.zeros([BLOCK_M, DV_PADDED], tl.float32)
    m, l = start_softmax(part, heads, inside, extras, V)
    state = (acc, m, l)
    # Where keys are few, half the code, which is fetched sooner, is worth more than keys that need no mask.
    ALL_MASKED: tl.constexpr = SHORT or V.MASK > 0
    first = begin
    middle = begin
    if not ALL_MASKED:
        if V.LEFT >= 0:
            first = begin + edge_keys(place, begin, kv_len, GROUP, BLOCK_M, BLOCK_N, V.LEFT)
        middle = first + (tl.maximum(full_end - first, 0) // BLOCK_N) * BLOCK_N
        state = attend_keys(state, q, scale, limit, cache, first, middle, end, None, row, masks, False, SAME_STRIDES,
                            D, DV, PAGE_SIZE, BLOCK_N, NUM_STAGES, PRECISION, V)  # fmt: skip
    gap = None
    last = end
    if V.LEFT >= 0:
        # The window's first keys and the last ones in one loop, which leaves out the middle.
        gap = (first, middle - first)
        last = end - (middle - first)
        middle = begin
    state = attend_keys(state, q, scale, limit, cache, middle, last, end, gap, row, masks, True, SAME_STRIDES,
                        D, DV, PAGE_SIZE, BLOCK_N, NUM_STAGES if ALL_MASKED else 2, PRECISION, V)  # fmt: skip
    out, lse = finish_softmax(*state)
    if V.V_SCALE > 0:
        out *= head_scale(extras[3], place[3], V.V_SCALE)
    return out, lse


@triton.jit
def store_empty(out, lse, place, row_count, num_tokens, out_strides, lse_strides, extras, GROUP: tl.constexpr,
                DV: tl.constexpr, DV_PADDED: tl.constexpr, BLOCK_M: tl.constexpr, V: tl.constexpr):  # fmt: skip
    """Rows without keys: nothing but a sink."""
    values = tl.zeros([BLOCK_M, DV_PADDED], tl.float32)
    lse_values = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for first_row in range(0, row_count, BLOCK_M):
        _, tokens, heads, inside = tile_rows(place, first_row, num_tokens, GROUP, BLOCK_M)
        if V.SINKS:
            lse_values = load_sinks(extras, heads, inside)
        store_rows(out, lse, values, lse_values, tokens, heads, inside, out_strides, lse_strides, DV)


@triton.jit(do_not_specialize=["num_tokens", "num_pages", "states_begin", "num_states", "first_item", "mask_length"],
            do_not_specialize_on_alignment=["page_table", "lse"])  # fmt: skip
def attention_kernel(q_ptr, k_cache, v_cache, out, lse, plan, page_table, scale_ptr, sm_scale, num_tokens, num_pages,
                     first_item, states_begin, num_states, extras, mask_length,
                     q_strides, k_strides, v_strides, out_strides, lse_strides, COUNT: tl.constexpr,
                     GROUP: tl.constexpr, SAME_STRIDES: tl.constexpr,
                     D: tl.constexpr, DV: tl.constexpr, D_PADDED: tl.constexpr, DV_PADDED: tl.constexpr,
                     PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                     NUM_STAGES: tl.constexpr, PRECISION: tl.constexpr, COMBINED: tl.constexpr,
                     V: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """One list of a plan, whose length is header word COUNT, from place first_item on.

    Strides are in elements: q, out, lse (token, head); caches (page, token in page, head). Partial states lie
    states_begin places after the items' begin. COMBINED: as in store_tile.
    extras, mask_length: as in variants.load_row; None where V has none.
    EARLY: launched before the kernel before it has ended, for which everything here must wait.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
    if tl.program_id(0) >= tl.load(plan + COUNT):
        return
    step: tl.constexpr = ITEM_WORDS if COUNT == NUM_ITEMS else -ITEM_WORDS
    index = first_item.to(tl.int64) * ITEM_WORDS + tl.program_id(0).to(tl.int64) * step
    item = plan + HEADER_WORDS + index
    begin, end = tl.load(item + KEY_BEGIN), tl.load(item + KEY_END)
    if (end <= begin) | (num_pages == 0):
        store_empty(out, lse, load_place(item), tl.load(item + ROW_COUNT), num_tokens, out_strides, lse_strides,
                    extras, GROUP, DV, DV_PADDED, BLOCK_M, V)  # fmt: skip
        return
    position = (tl.load(item + PAGE_HIGH).to(tl.int64) << 32) | (tl.load(item + PAGE_LOW).to(tl.int64) & 0xFFFFFFFF)
    tensors, strides = (q_ptr, k_cache, v_cache, page_table), (q_strides, k_strides, v_strides)
    part = tl.load(item + SPLIT) if V.SINKS else 0
    sequence = tl.load(item + SEQUENCE) if V.MASK > 0 else 0
    values, lse_values = attend_tile(
        tensors, strides, load_place(item), (begin, end, tl.load(item + FULL_END)), position, tl.load(item + KV_LEN),
        scale_ptr, sm_scale, num_tokens, num_pages, part, sequence, extras, mask_length, GROUP, SAME_STRIDES,
        D, DV, D_PADDED, DV_PADDED, PAGE_SIZE, BLOCK_M, BLOCK_N, NUM_STAGES, PRECISION,
        COMBINED is None, V)  # fmt: skip
    place = load_place(item)
    outs = plan + HEADER_WORDS + states_begin.to(tl.int64) * ITEM_WORDS
    outs = outs.to(tl.pointer_type(tl.float32), bitcast=True)
    states = (outs, outs + num_states.to(tl.int64) * (BLOCK_M * DV))
    part = tl.load(item + SPLIT, volatile=True)
    parts = (part, tl.load(item + NUM_SPLITS, volatile=True), tl.load(item + SLOT, volatile=True))
    # Not item - part * step: that would keep item in registers of its own, where there are none left.
    first_part = (
        plan + HEADER_WORDS + ARRIVED + (first_item * ITEM_WORDS + (tl.program_id(0) - part) * step).to(tl.int64)
    )
    store_tile(values, lse_values, place, parts, states, first_part, out, lse, num_tokens,
               out_strides, lse_strides, GROUP, DV, COMBINED)  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "num_pages", "num_states", "table_stride", "entries", "num_sequences",
                               "mask_length"],
            do_not_specialize_on_alignment=["page_table", "lse", "qo_indptr", "kv_ptr", "last_page_len"])  # fmt: skip
def attention_inline_kernel(q_ptr, k_cache, v_cache, out, lse, page_table, scale_ptr, sm_scale, num_tokens, num_pages,
                            states, counters, num_states, extras, mask_length,
                            qo_indptr, kv_ptr, last_page_len, table_stride, entries, num_sequences,
                            q_strides, k_strides, v_strides, out_strides, lse_strides, C: tl.constexpr,
                            GROUP: tl.constexpr, SAME_STRIDES: tl.constexpr,
                            D: tl.constexpr, DV: tl.constexpr, D_PADDED: tl.constexpr, DV_PADDED: tl.constexpr,
                            PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                            NUM_STAGES: tl.constexpr, PRECISION: tl.constexpr, COMBINED: tl.constexpr,
                            V: tl.constexpr):  # fmt: skip
    """attention_kernel without a plan: of a batch of few sequences, every program finds its own item.

    states, counters: room for num_states partial states, and as many zeros, which the kernel leaves so.
    """
    table = (qo_indptr, kv_ptr, last_page_len, table_stride, entries, num_tokens, num_sequences)
    found, item = find_item(tl.program_id(0), tl.num_programs(0), num_states, table, C)
    if not found:
        return
    (q_start, q_len, kv_len, position, kv_head, row_begin, begin, end, full_end, part, count, slot, sequence,
     row_count) = item  # fmt: skip
    place = (row_begin, q_start, q_len, kv_head)
    if (end <= begin) | (num_pages == 0):
        store_empty(out, lse, place, row_count, num_tokens, out_strides, lse_strides, extras, GROUP, DV, DV_PADDED,
                    BLOCK_M, V)  # fmt: skip
        return
    tensors, strides = (q_ptr, k_cache, v_cache, page_table), (q_strides, k_strides, v_strides)
    values, lse_values = attend_tile(
        tensors, strides, place, (begin, end, full_end), position, kv_len,
        scale_ptr, sm_scale, num_tokens, num_pages, part, sequence, extras, mask_length, GROUP, SAME_STRIDES,
        D, DV, D_PADDED, DV_PADDED, PAGE_SIZE, BLOCK_M, BLOCK_N, NUM_STAGES, PRECISION,
        COMBINED is None, V)  # fmt: skip
    partial = (states, states + num_states.to(tl.int64) * (BLOCK_M * DV))
    store_tile(values, lse_values, place, (part, count, slot), partial, counters + slot, out, lse, num_tokens,
               out_strides, lse_strides, GROUP, DV, COMBINED)  # fmt: skip
