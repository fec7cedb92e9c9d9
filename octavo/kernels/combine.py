"""Parts of a tile's keys: their partial states, and how the program that ends last combines them."""

import triton
import triton.language as tl

from octavo.kernels.primitives import finish_softmax, store_rows, tile_rows


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
                   DV: tl.constexpr, DV_PADDED: tl.constexpr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr,
                   PARTS: tl.constexpr):  # fmt: skip
    """Write a tile's rows from its states [first, first + count), always in the same order.

    PARTS of them at a time, ROWS rows: all are under way together, as nothing here hides how long one takes to come.
    """
    outs = states[0] + first.to(tl.int64) * (BLOCK_M * DV)
    lses = states[1] + first.to(tl.int64) * BLOCK_M
    dv = tl.arange(0, DV_PADDED)
    for first_row in range(0, BLOCK_M, ROWS):
        _, tokens, heads, inside = tile_rows(place, first_row, num_tokens, GROUP, ROWS)
        if tl.max(inside.to(tl.int32), 0) > 0:
            row = first_row + tl.arange(0, ROWS)
            top = tl.full([ROWS], float("-inf"), tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            mixed = tl.zeros([ROWS, DV_PADDED], tl.float32)
            for start in tl.range(0, count, PARTS, num_stages=1):
                # One by one, as a dimension of parts would be spread over threads, which then had to meet.
                for nth in tl.static_range(PARTS):
                    mask = inside & (start + nth < count)
                    at = (start + nth) * BLOCK_M + row
                    # .cg: other programs wrote these, and the first-level cache is not coherent.
                    found = tl.load(lses + at, mask=mask, other=float("-inf"), cache_modifier=".cg")
                    values = tl.load(outs + at[:, None] * DV + dv[None, :], mask=mask[:, None] & (dv[None, :] < DV),
                                     other=0.0, cache_modifier=".cg")  # fmt: skip
                    higher = tl.maximum(top, found)
                    safe = tl.where(higher == float("-inf"), 0.0, higher)
                    weight = tl.math.exp2(found - safe)
                    alpha = tl.math.exp2(top - safe)
                    mixed = mixed * alpha[:, None] + values * weight[:, None]
                    total = total * alpha + weight
                    top = higher
            values, merged = finish_softmax(mixed, top, total)
            store_rows(out, lse, values, merged, tokens, heads, inside, out_strides, lse_strides, DV)


@triton.jit
def store_tile(values, lse_values, place, parts, states, arrived, out, lse, num_tokens, out_strides, lse_strides,
               GROUP: tl.constexpr, DV: tl.constexpr, COMBINED: tl.constexpr):  # fmt: skip
    """Write a tile's rows, or its partial state, and then, where all its parts are written, its rows from these.

    parts: (this part, parts of the tile, the tile's first state). COMBINED: rows and parts at a time; None: no tile has
    parts.
    """
    BLOCK_M: tl.constexpr = values.shape[0]
    DV_PADDED: tl.constexpr = values.shape[1]
    part, count, slot = parts
    _, tokens, heads, inside = tile_rows(place, 0, num_tokens, GROUP, BLOCK_M)
    if COMBINED is None:
        store_rows(out, lse, values, lse_values, tokens, heads, inside, out_strides, lse_strides, DV)
    else:
        if count == 1:
            store_rows(out, lse, values, lse_values, tokens, heads, inside, out_strides, lse_strides, DV)
        else:
            store_state(states, slot + part, values, lse_values, inside, DV)
            if is_last(arrived, count):
                combine_states(states, slot, count, place, out, lse, num_tokens, out_strides, lse_strides,
                               GROUP, DV, DV_PADDED, BLOCK_M, COMBINED[0], COMBINED[1])  # fmt: skip
