"""Parts of a tile's keys in the sm_90 kernel: a warpgroup's partial states, and their sum by the one that ends last."""

from octavo.kernels import hopper_ptx as ptx
from octavo.kernels.gluon_compat import gl, gluon, partition_barrier
from octavo.kernels.hopper_program import (
    ARRIVED,
    BLOCK_M,
    HEADER_WORDS,
    ITEM_WORDS,
    NUM_SPLITS,
    Q_LEN,
    Q_START,
    ROWS,
    SLOT,
    SPLIT,
    THERE,
    packed_rows,
)


@gluon.jit
def state_pointers(p, state, rows):
    """(outs, lses) of a partial state's rows."""
    outs = p.plan + (HEADER_WORDS + p.states_begin.to(gl.int64) * ITEM_WORDS)
    outs = outs.to(gl.pointer_type(gl.float32), bitcast=True)
    lses = outs + p.num_states.to(gl.int64) * (BLOCK_M * p.config.D)
    row = state.to(gl.int64) * BLOCK_M + rows
    return outs + row * p.config.D, lses + row


@gluon.jit
def rows_inside(p, item, rows):
    """Which of an item's rows exist."""
    token, _ = packed_rows(p, item, rows)
    return (token < item.word(Q_LEN)) & (item.word(Q_START) + token < p.num_tokens)


@gluon.jit
def store_state(p, item, rows, out, lse):
    """The item's partial state. Rows that do not exist are not written, and never read."""
    outs, lses = state_pointers(p, item.word(SLOT) + item.word(SPLIT), rows)
    inside = rows_inside(p, item, rows)
    columns = gl.arange(0, p.config.D, layout=gl.SliceLayout(0, out.type.layout))
    gl.store(outs[:, None] + columns[None, :], out, mask=inside[:, None])
    gl.store(lses, lse, mask=inside)


@gluon.jit
def ends_last(p, item, WG: gl.constexpr):
    """Count the warpgroup's part as written; whether all are. Each warpgroup counts in a part of its own."""
    partition_barrier()
    first = item.word(THERE) - 1 - item.word(SPLIT)
    counter = p.plan + (HEADER_WORDS + (first + WG).to(gl.int64) * ITEM_WORDS + ARRIVED)
    ptx.count_arrival(counter.to(gl.int64), item.word(NUM_SPLITS) - 1, p.config.LAST + 4 * WG)
    partition_barrier()
    return ptx.load_word(p.config.LAST + 4 * WG, 0) != 0


@gluon.jit
def combine_states(p, item, rows, LAYOUT: gl.constexpr):
    """(out, lse) of a tile's rows from all its parts, always in the same order."""
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    inside = rows_inside(p, item, rows)
    columns = gl.arange(0, p.config.D, layout=gl.SliceLayout(0, LAYOUT))
    first, count = item.word(SLOT), item.word(NUM_SPLITS)
    top = gl.full([ROWS], float("-inf"), gl.float32, ROW)
    for part in range(count):
        _, lses = state_pointers(p, first + part, rows)
        # .cg: other CTAs wrote these, and the first-level cache is not coherent.
        top = gl.maximum(top, gl.load(lses, mask=inside, other=float("-inf"), cache_modifier=".cg"))
    safe = gl.where(top == float("-inf"), 0.0, top)
    total = gl.zeros([ROWS], gl.float32, ROW)
    out = gl.zeros([ROWS, p.config.D], gl.float32, LAYOUT)
    for part in range(count):
        outs, lses = state_pointers(p, first + part, rows)
        weight = gl.exp2(gl.load(lses, mask=inside, other=float("-inf"), cache_modifier=".cg") - safe)
        values = gl.load(outs[:, None] + columns[None, :], mask=inside[:, None], other=0.0, cache_modifier=".cg")
        out += values * weight[:, None]
        total += weight
    empty = total == 0.0
    inverse = gl.where(empty, 0.0, 1.0 / gl.where(empty, 1.0, total))
    lse = gl.where(empty, float("-inf"), safe + gl.log2(gl.where(empty, 1.0, total)))
    return out * inverse[:, None], lse
