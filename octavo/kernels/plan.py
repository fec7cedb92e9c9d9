"""The planner: one launch that writes a batch's work items, in order, without a sort, an atomic or a host round trip.

The place of a sequence's first item is a sum over all sequences that come before it (more keys, or as many and a
smaller index), so every program finds the places of its own sequences alone. planning/schedule.py models it.
"""

import triton
import triton.language as tl

from octavo import work_item as layout
from octavo.kernels.primitives import sequence_shape

HEADER_WORDS = tl.constexpr(layout.HEADER_WORDS)
NUM_ITEMS = tl.constexpr(layout.NUM_ITEMS)
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


@triton.jit
def tiles_of(q_len, kv_len, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, CAUSAL: tl.constexpr):
    """(tiles, leading ones of which no row sees a key) of sequences."""
    tiles = tl.cdiv(q_len * GROUP, BLOCK_M)
    dead = tl.zeros_like(tiles)
    if CAUSAL:
        dead = tl.maximum(q_len - kv_len, 0) * GROUP // BLOCK_M
    return tiles, tl.where(kv_len == 0, tiles, dead)


@triton.jit
def items_of(q_len, kv_len, GROUP: tl.constexpr, HKV: tl.constexpr, BLOCK_M: tl.constexpr, CAUSAL: tl.constexpr,
             DEAD_TILES: tl.constexpr):  # fmt: skip
    tiles, dead = tiles_of(q_len, kv_len, GROUP, BLOCK_M, CAUSAL)
    return (tiles - dead + tl.cdiv(dead, DEAD_TILES)) * HKV


@triton.jit
def visible_keys(token, q_len, kv_len, CAUSAL: tl.constexpr):
    """Keys that a token sees: causal is bottom-right aligned."""
    seen = tl.zeros_like(token) + kv_len
    if CAUSAL:
        seen = tl.minimum(tl.maximum(seen + token - q_len + 1, 0), kv_len)
    return seen


@triton.jit
def locate_item(index, q_len, kv_len, GROUP: tl.constexpr, HKV: tl.constexpr, BLOCK_M: tl.constexpr,
                CAUSAL: tl.constexpr, DEAD_TILES: tl.constexpr, L2_KEYS: tl.constexpr):  # fmt: skip
    """(kv head, first row, rows) of a sequence's index-th item.

    As many heads at a time as the L2 holds (L2_KEYS keys of one head), tiles from the last down; then the dead ones.
    """
    tiles, dead = tiles_of(q_len, kv_len, GROUP, BLOCK_M, CAUSAL)
    live = tiles - dead
    together = tl.minimum(tl.maximum(L2_KEYS // tl.maximum(kv_len, 1), 1), HKV)
    group = index // tl.maximum(together * live, 1)
    width = tl.maximum(tl.minimum(together, HKV - group * together), 1)
    nth = index - group * together * live
    live_head = group * together + nth % width
    live_row = (tiles - 1 - nth // width) * BLOCK_M

    runs = tl.maximum(tl.cdiv(dead, DEAD_TILES), 1)
    nth = index - live * HKV
    is_dead = nth >= 0
    first = nth % runs * DEAD_TILES
    head = tl.where(is_dead, nth // runs, live_head)
    row_begin = tl.where(is_dead, first * BLOCK_M, live_row)
    return head, row_begin, tl.where(is_dead, tl.minimum(dead - first, DEAD_TILES), 1) * BLOCK_M


@triton.jit
def store_item(item, mask, shape, place, sequence, GROUP: tl.constexpr, CAUSAL: tl.constexpr):
    q_start, q_len, kv_len, position = shape
    kv_head, row_begin, row_count = place
    last_token = tl.minimum((row_begin + row_count - 1) // GROUP, q_len - 1)
    tl.store(item + Q_START, q_start, mask)
    tl.store(item + Q_LEN, q_len, mask)
    tl.store(item + KV_LEN, kv_len, mask)
    tl.store(item + PAGE_LOW, position.to(tl.int32), mask)
    tl.store(item + PAGE_HIGH, (position >> 32).to(tl.int32), mask)
    tl.store(item + KV_HEAD, kv_head, mask)
    tl.store(item + ROW_BEGIN, row_begin, mask)
    tl.store(item + KEY_BEGIN, tl.zeros_like(row_begin), mask)
    tl.store(item + KEY_END, visible_keys(last_token, q_len, kv_len, CAUSAL), mask)
    tl.store(item + FULL_END, visible_keys(row_begin // GROUP, q_len, kv_len, CAUSAL), mask)
    tl.store(item + SPLIT, tl.zeros_like(row_begin), mask)
    tl.store(item + NUM_SPLITS, tl.full(row_begin.shape, 1, tl.int32), mask)
    tl.store(item + SLOT, tl.zeros_like(row_begin), mask)
    tl.store(item + SEQUENCE, sequence, mask)
    tl.store(item + ROW_COUNT, row_count, mask)


@triton.jit(do_not_specialize=["table_stride", "entries", "num_tokens", "num_sequences", "capacity"],
            do_not_specialize_on_alignment=["qo_indptr", "kv_ptr", "last_page_len"])  # fmt: skip
def plan_kernel(plan, qo_indptr, kv_ptr, last_page_len, table_stride, entries, num_tokens, num_sequences, capacity,
                GROUP: tl.constexpr, HKV: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
                CAUSAL: tl.constexpr, DENSE: tl.constexpr, DEAD_TILES: tl.constexpr, L2_KEYS: tl.constexpr,
                OWN: tl.constexpr, OTHERS: tl.constexpr, ITEMS: tl.constexpr):  # fmt: skip
    """Grid (sequences and padding / OWN, writers): a program places OWN sequences and writes every writers-th chunk of
    ITEMS of their items."""
    own = tl.program_id(0) * OWN + tl.arange(0, OWN)
    table = (qo_indptr, kv_ptr, last_page_len, table_stride, entries, num_tokens, num_sequences)
    own_shape = sequence_shape(table, own, PAGE_SIZE, DENSE)
    own_items = items_of(own_shape[1], own_shape[2], GROUP, HKV, BLOCK_M, CAUSAL, DEAD_TILES)

    place = tl.zeros([OWN], tl.int32)
    total = 0
    for start in range(0, num_sequences + 1, OTHERS):
        other = start + tl.arange(0, OTHERS)
        other_shape = sequence_shape(table, other, PAGE_SIZE, DENSE)
        items = items_of(other_shape[1], other_shape[2], GROUP, HKV, BLOCK_M, CAUSAL, DEAD_TILES)
        longer = other_shape[2][None, :] > own_shape[2][:, None]
        equal = other_shape[2][None, :] == own_shape[2][:, None]
        before = longer | (equal & (other[None, :] < own[:, None]))
        place += tl.sum(tl.where(before, items[None, :], 0), 1)
        total = tl.minimum(total + tl.sum(items, 0), 1 << 30)
    # More than the plan has room for only where offsets fall: then nothing is planned.
    fits = total <= capacity
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(plan + NUM_ITEMS, tl.where(fits, total, 0))
        tl.store(plan + ITEMS_TAKEN, 0)
    if not fits:
        return

    ends = tl.cumsum(own_items, 0)
    mine = tl.sum(own_items, 0)
    index = tl.arange(0, OWN)
    for start in range(tl.program_id(1) * ITEMS, mine, tl.num_programs(1) * ITEMS):
        nth = start + tl.arange(0, ITEMS)
        which = tl.sum((nth[:, None] >= ends[None, :]).to(tl.int32), 1)
        # A one-hot sum reads a per-sequence register value by index.
        chosen = index[None, :] == which[:, None]
        inside = nth - tl.sum(tl.where(chosen, (ends - own_items)[None, :], 0), 1)
        slot = inside + tl.sum(tl.where(chosen, place[None, :], 0), 1)
        sequence = tl.program_id(0) * OWN + which
        shape = sequence_shape(table, sequence, PAGE_SIZE, DENSE)
        place_in = locate_item(inside, shape[1], shape[2], GROUP, HKV, BLOCK_M, CAUSAL, DEAD_TILES, L2_KEYS)
        item = plan + HEADER_WORDS + slot.to(tl.int64) * ITEM_WORDS
        store_item(item, nth < mine, shape, place_in, sequence, GROUP, CAUSAL)
