"""Parts of a tile's keys: their partial states, and how the program that ends last combines them."""

import triton
import triton.language as tl

from octavo.kernels.primitives import store_rows, tile_rows

COMBINED_ROWS = tl.constexpr(8)
LSES_AT_ONCE = tl.constexpr(64)


@triton.jit
def store_state(states, state, values, lse_values, inside, DV: tl.constexpr):
    """One part's partial state: rows that exist, a row without keys as 0 and -inf, so nothing else is ever read.

    states: (outs [states, rows, DV], lses [states, rows]).
    """
    outs, lses = states
    BLOCK_M: tl.constexpr = values.shape[0]
    dv = tl.arange(0, values.shape[1])
    row = tl.arange(0, BLOCK_M)
    first_row = state.to(tl.int64) * BLOCK_M
    mask = inside[:, None] & (dv[None, :] < DV)
    tl.store(outs + first_row * DV + (row[:, None] * DV + dv[None, :]), values, mask=mask)
    tl.store(lses + first_row + row, lse_values, mask=inside)


@triton.jit
def is_last(arrived, count):
    """Count one part of a tile as written; whether all are, and then for every program that reads. Leaves 0 behind."""
    # One thread counts for the whole program: it must come after every thread's stores.
    tl.debug_barrier()
    last = tl.atomic_add(arrived, 1, sem="acq_rel") == count - 1
    if last:
        tl.store(arrived, 0)
    return last


@triton.jit
def combine_states(states, first, count, place, out, lse, num_tokens, out_strides, lse_strides, GROUP: tl.constexpr,
                   DV: tl.constexpr, DV_PADDED: tl.constexpr, BLOCK_M: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """Write a tile's rows from its states [first, first + count), always in the same order."""
    outs = states[0] + first.to(tl.int64) * (BLOCK_M * DV)
    lses = states[1] + first.to(tl.int64) * BLOCK_M
    dv = tl.arange(0, DV_PADDED)
    for first_row in range(0, BLOCK_M, COMBINED_ROWS):
        _, tokens, heads, inside = tile_rows(place, first_row, num_tokens, GROUP, COMBINED_ROWS)
        if tl.max(inside.to(tl.int32), 0) > 0:
            row = first_row + tl.arange(0, COMBINED_ROWS)
            top = tl.full([COMBINED_ROWS], float("-inf"), tl.float32)
            for start in range(0, count, LSES_AT_ONCE):
                part = start + tl.arange(0, LSES_AT_ONCE)
                mask = (part < count)[:, None] & inside[None, :]
                # .cg: other programs wrote these, and the first-level cache is not coherent.
                found = tl.load(lses + part[:, None] * BLOCK_M + row[None, :], mask=mask, other=float("-inf"),
                                cache_modifier=".cg")  # fmt: skip
                top = tl.maximum(top, tl.max(found, 0))
            safe = tl.where(top == float("-inf"), 0.0, top)
            total = tl.zeros([COMBINED_ROWS], tl.float32)
            mixed = tl.zeros([COMBINED_ROWS, DV_PADDED], tl.float32)
            for start in tl.range(0, count, PARTS, num_stages=4):
                part = start + tl.arange(0, PARTS)
                mask = (part < count)[:, None] & inside[None, :]
                at = part[:, None] * BLOCK_M + row[None, :]
                found = tl.load(lses + at, mask=mask, other=float("-inf"), cache_modifier=".cg")
                weight = tl.math.exp2(found - safe[None, :])
                values = tl.load(outs + at[:, :, None] * DV + dv[None, None, :],
                                 mask=mask[:, :, None] & (dv[None, None, :] < DV), other=0.0,
                                 cache_modifier=".cg")  # fmt: skip
                mixed += tl.sum(values * weight[:, :, None], 0)
                total += tl.sum(weight, 0)
            empty = total == 0.0
            mixed = mixed * tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, total))[:, None]
            merged = tl.where(empty, float("-inf"), safe + tl.math.log2(tl.where(empty, 1.0, total)))
            store_rows(out, lse, mixed, merged, tokens, heads, inside, out_strides, lse_strides, DV)


@triton.jit
def store_tile(values, lse_values, place, parts, states, arrived, out, lse, num_tokens, out_strides, lse_strides,
               GROUP: tl.constexpr, DV: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """Write a tile's rows, or its partial state, and then, where all its parts are written, its rows from these.

    parts: (this part, parts of the tile, the tile's first state). PARTS states are read at a time; 0: there are none.
    """
    BLOCK_M: tl.constexpr = values.shape[0]
    DV_PADDED: tl.constexpr = values.shape[1]
    part, count, slot = parts
    _, tokens, heads, inside = tile_rows(place, 0, num_tokens, GROUP, BLOCK_M)
    if PARTS == 0:
        store_rows(out, lse, values, lse_values, tokens, heads, inside, out_strides, lse_strides, DV)
    else:
        if count == 1:
            store_rows(out, lse, values, lse_values, tokens, heads, inside, out_strides, lse_strides, DV)
        else:
            store_state(states, slot + part, values, lse_values, inside, DV)
            if is_last(arrived, count):
                combine_states(states, slot, count, place, out, lse, num_tokens, out_strides, lse_strides,
                               GROUP, DV, DV_PADDED, BLOCK_M, PARTS)  # fmt: skip
