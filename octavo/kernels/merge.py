"""Combine attention states over disjoint keys."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def merge_kernel(outs, lses, out, lse, out_strides_in, lse_strides_in, out_strides, lse_strides, num_rows,
                 HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK_R: tl.constexpr):  # fmt: skip
    """Rows are (token, head); outs and lses are tuples, folded in their order. Weights are 2^(lse_i - max lse)."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    token, head = row // HEADS, row % HEADS
    inside = row < num_rows
    d = tl.arange(0, PADDED)
    top = tl.full([BLOCK_R], float("-inf"), tl.float32)
    for i in tl.static_range(len(outs)):
        offset = token * lse_strides_in[i][0] + head * lse_strides_in[i][1]
        top = tl.maximum(top, tl.load(lses[i] + offset, mask=inside, other=float("-inf")))
    safe = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([BLOCK_R], tl.float32)
    mixed = tl.zeros([BLOCK_R, PADDED], tl.float32)
    for i in tl.static_range(len(outs)):
        offset = token * lse_strides_in[i][0] + head * lse_strides_in[i][1]
        weight = tl.math.exp2(tl.load(lses[i] + offset, mask=inside, other=float("-inf")) - safe)
        # An empty state's out is not read: whatever it holds must not matter.
        mask = (inside & (weight > 0))[:, None] & (d[None, :] < DIM)
        offset = token * out_strides_in[i][0] + head * out_strides_in[i][1]
        mixed += weight[:, None] * tl.load(outs[i] + offset[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
        total += weight
    empty = total == 0.0
    mixed = mixed / tl.where(empty, 1.0, total)[:, None]
    merged = tl.where(empty, float("-inf"), safe + tl.math.log2(tl.where(empty, 1.0, total)))
    offset = token * out_strides[0] + head * out_strides[1]
    mask = inside[:, None] & (d[None, :] < DIM)
    tl.store(out + offset[:, None] + d[None, :], mixed.to(out.dtype.element_ty), mask=mask)
    tl.store(lse + token * lse_strides[0] + head * lse_strides[1], merged, mask=inside)
