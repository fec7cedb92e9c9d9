"""Combine attention states over disjoint sets of keys."""

from collections.abc import Sequence

import torch

from octavo import ops
from octavo.errors import fail
from octavo.shapes import LogSumExp, Output, Tensor
from octavo.validation import check_device, check_last_dim, check_no_grad, check_shape


def merge(states: Sequence[tuple[Output, LogSumExp]]) -> tuple[Output, LogSumExp]:
    """Merge (out, lse) states of the same queries over disjoint keys, as if attention had run over all keys at once.

    With lse in base 2: lse = log2(sum_i 2^lse_i), out = sum_i 2^(lse_i - lse) out_i. States are combined in the given
    order, in float32; empty ones (lse -inf) are neutral, and rows empty in all stay out 0, lse -inf.

    Args:
        states: one or more (out [tokens, heads, dim], lse [tokens, heads] float32), equal shapes and dtypes.

    >>> import torch
    >>> a, b = (torch.ones(1, 1, 16), torch.zeros(1, 1)), (torch.zeros(1, 1, 16), torch.zeros(1, 1))
    >>> out, lse = merge([a, b])
    >>> out[0, 0, 0].item(), lse.item()
    (0.5, 1.0)
    """
    if not states:
        fail("states", "one or more (out, lse) pairs", "none", "pass the states to combine")
    for i, state in enumerate(states):
        if not isinstance(state, (tuple, list)) or len(state) != 2:
            fail(f"states[{i}]", "a pair (out, lse)", type(state).__name__, "pass what run() returned", TypeError)
    first = states[0][0]
    if not isinstance(first, Tensor) or first.dim() != 3:
        got = type(first).__name__ if not isinstance(first, Tensor) else f"shape {list(first.shape)}"
        fail("states[0] out", "a tensor [tokens, heads, dim]", got, "pass what run() returned")
    for i, (out, lse) in enumerate(states):
        check_shape(f"states[{i}] out", out, tuple(first.shape))
        check_shape(f"states[{i}] lse", lse, tuple(first.shape[:2]))
        if out.dtype != first.dtype or not out.is_floating_point():
            fail(f"states[{i}] out", f"dtype {first.dtype}", out.dtype, "merge states of one dtype", TypeError)
        if lse.dtype != torch.float32:
            fail(f"states[{i}] lse", "dtype torch.float32", lse.dtype, "lse.float()", TypeError)
        check_last_dim(f"states[{i}] out", out)
        check_device(f"states[{i}] out", out, first.device)
        check_device(f"states[{i}] lse", lse, first.device)
        check_no_grad(out=out, lse=lse)
    return ops.merge([out for out, _ in states], [lse for _, lse in states])
