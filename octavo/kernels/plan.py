"""The planner: one launch that writes a batch's work items, in order, without a sort, an atomic or a host round trip.

The place of a sequence's first item is a sum over all sequences that come before it (more keys, or as many and a
smaller index), so every program finds the places of its own sequences alone. planning/schedule.py models it.

C holds the constants: octavo.backends.constants.PlanConstants.
"""

import triton
import triton.language as tl

from octavo import work_item as layout
from octavo.kernels.primitives import sequence_shape
from octavo.kernels.variants import first_visible, visible_keys

HEADER_WORDS = tl.constexpr(layout.HEADER_WORDS)
NUM_ITEMS = tl.constexpr(layout.NUM_ITEMS)
NUM_SMALL_ITEMS = tl.constexpr(layout.NUM_SMALL_ITEMS)
ITEMS_TAKEN = tl.constexpr(layout.ITEMS_TAKEN)
ITEM_WORDS = tl.constexpr(layout.ITEM_WORDS)
Q_START = tl.constexpr(layout.Q_START)
Q_LEN = tl.constexpr(layout.Q_LEN)
KV_LEN = tl.constexpr(layout.KV_LEN)
PAGE_LOW = tl.constexpr(layout.PAGE_LOW)
PAGE_HIGH = tl.constexpr(layout.PAGE_HIGH)
KV_HEAD = tl.constexpr(layout.KV_HEAD)
ROW_BEGIN = tl.constexpr(layout.ROW_BEGIN)
KEY_BEGIN = tl.constexpr(layout.KEY_BEGIN)
KEY_END = tl.constexpr(layout.KEY_END)
FULL_END = tl.constexpr(layout.FULL_END)
SPLIT = tl.constexpr(layout.SPLIT)
NUM_SPLITS = tl.constexpr(layout.NUM_SPLITS)
SLOT = tl.constexpr(layout.SLOT)
SEQUENCE = tl.constexpr(layout.SEQUENCE)
ROW_COUNT = tl.constexpr(layout.ROW_COUNT)
ARRIVED = tl.constexpr(layout.ARRIVED)


@triton.jit
def by_list(is_small, main, small, C: tl.constexpr):
    """The value of a sequence's list."""
    value = main
    if C.SMALL_M > 0:
        value = tl.where(is_small, small, main)
    return value


@triton.jit
def in_small_list(q_len, C: tl.constexpr):
    return q_len * C.GROUP <= C.SMALL_M


@triton.jit
def tiles_of(q_len, kv_len, C: tl.constexpr):
    """(whether in the small list, rows of a tile, tiles that see keys, tiles before them that do not) of sequences."""
    is_small = in_small_list(q_len, C)
    rows = by_list(is_small, C.BLOCK_M, C.SMALL_M, C)
    tiles = tl.cdiv(q_len * C.GROUP, rows)
    dead = tiles * 0
    if C.RIGHT >= 0:
        dead = tl.maximum(q_len - kv_len - C.RIGHT, 0) * C.GROUP // rows
    dead = tl.where(kv_len == 0, tiles, dead)
    return is_small, rows, tiles - dead, dead


@triton.jit
def span_of(q_len, kv_len, rows, C: tl.constexpr):
    """The most keys that one tile of a sequence may see."""
    span = kv_len
    if C.LEFT >= 0:
        tokens = q_len
        if C.RIGHT >= 0:
            # Of a tile's rows, whose first may be the last of its token's group.
            tokens = tl.minimum(tl.cdiv(rows - 1, C.GROUP) + 1, q_len) + C.RIGHT
        span = tl.minimum(kv_len, tokens + C.LEFT)
    return span


@triton.jit
def work_of(q_len, kv_len, C: tl.constexpr):
    """(whether in the small list, keys that a sequence's tiles see over all K/V heads, near enough)."""
    is_small, rows, live, dead = tiles_of(q_len, kv_len, C)
    last_token = tl.minimum(((dead + 1) * rows - 1) // C.GROUP, q_len - 1)
    by_area = by_list(is_small, C.MAIN.BY_AREA, C.SMALL.BY_AREA, C)
    span = span_of(q_len, kv_len, rows, C)
    first = tl.where(by_area, tl.minimum(visible_keys(last_token, q_len, kv_len, C.RIGHT), span), span)
    return is_small, live.to(tl.int64) * ((first + span + 1) // 2) * C.HKV


@triton.jit
def limit_of(work, S: tl.constexpr):
    """Key blocks that a part may have: 1.15 times the mean load of a worker, or that rounded up, or the least."""
    slack = work * 23 // (20 * S.WORKERS * S.KEY_BLOCK)
    even = (work + S.WORKERS * S.KEY_BLOCK - 1) // (S.WORKERS * S.KEY_BLOCK)
    return tl.minimum(tl.maximum(tl.maximum(slack, even), S.MIN_BLOCKS), 1 << 30).to(tl.int32)


@triton.jit
def part_limits(table, C: tl.constexpr):
    """limit_of the main and the small list, from the lengths of all sequences."""
    OTHERS: tl.constexpr = C.OTHERS
    main_work = tl.zeros([OTHERS], tl.int64)
    small_work = tl.zeros([OTHERS], tl.int64)
    if C.MAIN.WORKERS + C.SMALL.WORKERS > 0:
        for start in range(0, table[6] + 1, C.OTHERS):
            _, q_len, kv_len, _ = sequence_shape(table, start + tl.arange(0, C.OTHERS), C.PAGE_SIZE, C.DENSE)
            is_small, work = work_of(q_len, kv_len, C)
            main_work += by_list(is_small, work, 0, C)
            small_work += by_list(is_small, 0, work, C)
    return limits_of(tl.sum(main_work, 0), tl.sum(small_work, 0), C)


@triton.jit
def limits_of(main_work, small_work, C: tl.constexpr):
    MAIN: tl.constexpr = C.MAIN
    SMALL: tl.constexpr = C.SMALL
    main_limit = 1 << 30
    small_limit = 1 << 30
    if MAIN.WORKERS > 0:
        main_limit = limit_of(main_work, MAIN)
    if SMALL.WORKERS > 0:
        small_limit = limit_of(small_work, SMALL)
    return main_limit, small_limit


@triton.jit
def list_parts(span, limit, S: tl.constexpr):
    blocks = tl.cdiv(span, S.KEY_BLOCK)
    parts = blocks * 0 + 1
    if S.FIXED_BLOCKS > 0:
        limit = tl.maximum(tl.cdiv(blocks, S.FIXED_PARTS), S.FIXED_BLOCKS)
    if S.FIXED_BLOCKS + S.WORKERS > 0:
        parts = tl.maximum(tl.cdiv(blocks, limit), 1)
    return parts


@triton.jit
def items_of(q_len, kv_len, limits, C: tl.constexpr):
    """(whether in the small list, parts of each tile, items, partial states) of sequences."""
    is_small, rows, live, dead = tiles_of(q_len, kv_len, C)
    span = span_of(q_len, kv_len, rows, C)
    main_limit, small_limit = limits
    MAIN: tl.constexpr = C.MAIN
    SMALL: tl.constexpr = C.SMALL
    parts = list_parts(span, main_limit, MAIN)
    if C.SMALL_M > 0:
        parts = tl.where(is_small, list_parts(span, small_limit, SMALL), parts)
    alive = live * C.HKV * parts
    return is_small, parts, alive + tl.cdiv(dead, C.DEAD_TILES) * C.HKV, tl.where(parts > 1, alive, 0)


@triton.jit
def make_item(index, shape, sequence, parts, first_slot, C: tl.constexpr):
    """A sequence's index-th item, in the order of its fields.

    As many heads at a time as the L2 holds (L2_KEYS keys of one head), tiles from the last down, the parts of each;
    then the tiles without keys.
    """
    q_start, q_len, kv_len, position = shape
    is_small, rows, live, dead = tiles_of(q_len, kv_len, C)
    part = index % parts
    together = tl.minimum(tl.maximum(C.L2_KEYS // tl.maximum(kv_len, 1), 1), C.HKV)
    tile = index // parts
    group = tile // tl.maximum(together * live, 1)
    width = tl.maximum(tl.minimum(together, C.HKV - group * together), 1)
    nth = tile - group * together * live
    live_head = group * together + nth % width
    live_tile = live - 1 - nth // width

    runs = tl.maximum(tl.cdiv(dead, C.DEAD_TILES), 1)
    nth = index - live * C.HKV * parts
    is_dead = nth >= 0
    first = nth % runs * C.DEAD_TILES
    head = tl.where(is_dead, nth // runs, live_head)
    row_begin = tl.where(is_dead, first, dead + live_tile) * rows
    row_count = tl.where(is_dead, tl.minimum(dead - first, C.DEAD_TILES), 1) * rows
    part = tl.where(is_dead, 0, part)

    last_token = tl.minimum((row_begin + row_count - 1) // C.GROUP, q_len - 1)
    first_key = first_visible(row_begin // C.GROUP, q_len, kv_len, C.LEFT)
    keys = visible_keys(last_token, q_len, kv_len, C.RIGHT)
    if C.LEFT >= 0:
        keys = tl.maximum(keys - first_key, 0)
    key_block = by_list(is_small, C.MAIN.KEY_BLOCK, C.SMALL.KEY_BLOCK, C)
    blocks = tl.cdiv(keys, key_block)
    longest = tl.cdiv(tl.cdiv(span_of(q_len, kv_len, rows, C), key_block), parts)
    count = tl.maximum(tl.cdiv(blocks, tl.maximum(longest, 1)), 1)
    length = tl.cdiv(blocks, count) * key_block
    begin = first_key + tl.minimum(part * length, keys)
    end = tl.minimum(begin + length, first_key + keys)
    full_end = visible_keys(row_begin // C.GROUP, q_len, kv_len, C.RIGHT)
    slot = tl.where(count > 1, first_slot + (live_tile * C.HKV + head) * parts, 0)
    row_count = tl.where(part < count, row_count, 0)
    return (q_start, q_len, kv_len, position, head, row_begin, begin, end,
            tl.minimum(tl.maximum(full_end, begin), end), part, count, slot, sequence, row_count)  # fmt: skip


@triton.jit
def store_item(item, mask, fields):
    (q_start, q_len, kv_len, position, kv_head, row_begin, begin, end, full_end, part, count, slot, sequence,
     row_count) = fields  # fmt: skip
    tl.store(item + Q_START, q_start, mask)
    tl.store(item + Q_LEN, q_len, mask)
    tl.store(item + KV_LEN, kv_len, mask)
    tl.store(item + PAGE_LOW, position.to(tl.int32), mask)
    tl.store(item + PAGE_HIGH, (position >> 32).to(tl.int32), mask)
    tl.store(item + KV_HEAD, kv_head, mask)
    tl.store(item + ROW_BEGIN, row_begin, mask)
    tl.store(item + KEY_BEGIN, begin, mask)
    tl.store(item + KEY_END, end, mask)
    tl.store(item + FULL_END, full_end, mask)
    tl.store(item + SPLIT, part, mask)
    tl.store(item + NUM_SPLITS, count, mask)
    tl.store(item + SLOT, slot, mask)
    tl.store(item + SEQUENCE, sequence, mask)
    tl.store(item + ROW_COUNT, row_count, mask)
    tl.store(item + ARRIVED, row_begin * 0, mask)


@triton.jit
def places_of(table, own, own_shape, limits, C: tl.constexpr):
    """(first place in its list, first partial state) of each own sequence, and of a list's end: (main items,
    small items, main states, small states). Places of broken offsets, which may pass 2^31, are cut there."""
    own_small = in_small_list(own_shape[1], C)
    OWN: tl.constexpr = C.OWN
    place = tl.zeros([OWN], tl.int32)
    state = tl.zeros([OWN], tl.int32)
    main_items = 0
    small_items = 0
    main_states = 0
    small_states = 0
    for start in range(0, table[6] + 1, C.OTHERS):
        other = start + tl.arange(0, C.OTHERS)
        _, q_len, kv_len, _ = sequence_shape(table, other, C.PAGE_SIZE, C.DENSE)
        is_small, _, items, states = items_of(q_len, kv_len, limits, C)
        longer = kv_len[None, :] > own_shape[2][:, None]
        equal = kv_len[None, :] == own_shape[2][:, None]
        before = longer | (equal & (other[None, :] < own[:, None]))
        if C.SMALL_M > 0:
            before = before & (is_small[None, :] == own_small[:, None])
            small_items = tl.minimum(small_items + tl.sum(tl.where(is_small, items, 0), 0), 1 << 29)
            small_states = tl.minimum(small_states + tl.sum(tl.where(is_small, states, 0), 0), 1 << 29)
        place += tl.sum(tl.where(before, items[None, :], 0), 1)
        state += tl.sum(tl.where(before, states[None, :], 0), 1)
        main_items = tl.minimum(main_items + tl.sum(by_list(is_small, items, 0, C), 0), 1 << 29)
        main_states = tl.minimum(main_states + tl.sum(by_list(is_small, states, 0, C), 0), 1 << 29)
    return place, state, (main_items, small_items, main_states, small_states)


@triton.jit
def add_each(a0, a1, a2, a3, a4, a5, a6, b0, b1, b2, b3, b4, b5, b6):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6


@triton.jit
def find_item(index, capacity, num_states, table, C: tl.constexpr):
    """(whether there is one, the index-th item) of a batch whose sequences, with the padding, are at most C.OTHERS.

    Sequences follow each other as they come; all their items are in one list. As in plan_kernel, broken offsets that
    ask for more than `capacity` items or num_states partial states get nothing.
    """
    q_starts, q_lens, kv_lens, positions = sequence_shape(table, tl.arange(0, C.OTHERS), C.PAGE_SIZE, C.DENSE)
    _, work = work_of(q_lens, kv_lens, C)
    limits = limits_of(tl.sum(work, 0), 0, C)
    _, _, items, states = items_of(q_lens, kv_lens, limits, C)
    # Items and states in one number: every sum over the sequences makes all warps wait for each other.
    both = (items.to(tl.int64) << 32) | states.to(tl.int64)
    ends = tl.cumsum(both, 0)
    starts = ends - both
    # What belongs to the item's sequence is summed with the rest: to read it again would take longer.
    chosen = ((ends >> 32) > index) & ((starts >> 32) <= index)
    total, before, position, q_start, q_len, kv_len, sequence = tl.reduce(
        (both, tl.where(chosen, starts, 0), tl.where(chosen, positions, 0), tl.where(chosen, q_starts, 0),
         tl.where(chosen, q_lens, 0), tl.where(chosen, kv_lens, 0), tl.where(chosen, tl.arange(0, C.OTHERS), 0)),
        0, add_each)  # fmt: skip
    total_items, total_states = total >> 32, total & 0xFFFFFFFF
    found = (index < total_items) & (total_items <= capacity) & (total_states <= num_states)
    shape = (q_start, q_len, kv_len, position)
    _, parts, _, _ = items_of(q_len, kv_len, limits, C)
    inside = index - (before >> 32).to(tl.int32)
    return found, make_item(inside, shape, sequence, parts, (before & 0xFFFFFFFF).to(tl.int32), C)


@triton.jit(do_not_specialize=["table_stride", "entries", "num_tokens", "num_sequences", "capacity", "main_room",
                               "small_room"],
            do_not_specialize_on_alignment=["plan", "qo_indptr", "kv_ptr", "last_page_len"])  # fmt: skip
def plan_kernel(plan, qo_indptr, kv_ptr, last_page_len, table_stride, entries, num_tokens, num_sequences, capacity,
                main_room, small_room, C: tl.constexpr):  # fmt: skip
    """Grid (sequences and padding / OWN, writers): a program places OWN sequences and writes every writers-th chunk of
    ITEMS of their items. There is room for `capacity` items, main_room and small_room partial states."""
    if C.EARLY:
        # The attention kernel may be brought to the SMs meanwhile; it waits for the end of this one.
        tl.extra.cuda.gdc_launch_dependents()
    own = tl.program_id(0) * C.OWN + tl.arange(0, C.OWN)
    table = (qo_indptr, kv_ptr, last_page_len, table_stride, entries, num_tokens, num_sequences)
    own_shape = sequence_shape(table, own, C.PAGE_SIZE, C.DENSE)
    limits = part_limits(table, C)
    _, own_parts, own_items, _ = items_of(own_shape[1], own_shape[2], limits, C)
    place, state, totals = places_of(table, own, own_shape, limits, C)
    main_items, small_items, main_states, small_states = totals
    # More than there is room for only where offsets fall: then nothing is planned.
    fits = (main_items + small_items <= capacity) & (main_states <= main_room) & (small_states <= small_room)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(plan + NUM_ITEMS, tl.where(fits, main_items, 0))
        tl.store(plan + NUM_SMALL_ITEMS, tl.where(fits, small_items, 0))
        tl.store(plan + ITEMS_TAKEN, 0)
    if not fits:
        return

    ends = tl.cumsum(own_items, 0)
    mine = tl.sum(own_items, 0)
    lane = tl.arange(0, C.OWN)
    for start in range(tl.program_id(1) * C.ITEMS, mine, tl.num_programs(1) * C.ITEMS):
        nth = start + tl.arange(0, C.ITEMS)
        which = tl.sum((nth[:, None] >= ends[None, :]).to(tl.int32), 1)
        # A one-hot sum reads a per-sequence register value by index.
        chosen = lane[None, :] == which[:, None]
        inside = nth - tl.sum(tl.where(chosen, (ends - own_items)[None, :], 0), 1)
        at = inside + tl.sum(tl.where(chosen, place[None, :], 0), 1)
        first_slot = tl.sum(tl.where(chosen, state[None, :], 0), 1)
        parts = tl.maximum(tl.sum(tl.where(chosen, own_parts[None, :], 0), 1), 1)
        sequence = tl.program_id(0) * C.OWN + which
        shape = sequence_shape(table, sequence, C.PAGE_SIZE, C.DENSE)
        fields = make_item(inside, shape, sequence, parts, first_slot, C)
        if C.SMALL_M > 0:
            at = tl.where(in_small_list(shape[1], C), capacity - 1 - at, at)
        store_item(plan + HEADER_WORDS + at.to(tl.int64) * ITEM_WORDS, nth < mine, fields)
