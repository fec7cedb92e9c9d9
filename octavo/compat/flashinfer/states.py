"""flashinfer.cascade's functions on states: out [tokens, heads, dim], and lse [tokens, heads] in base 2."""

import torch

from octavo.merge import merge
from octavo.shapes import LogSumExp, Output, Tensor


def merge_state(v_a: Output, s_a: LogSumExp, v_b: Output, s_b: LogSumExp) -> tuple[Output, LogSumExp]:
    """The state over both sets of keys."""
    return merge([(v_a, s_a.float()), (v_b, s_b.float())])


def merge_state_in_place(
    v: Output, s: LogSumExp, v_other: Output, s_other: LogSumExp, mask: Tensor | None = None
) -> None:
    """(v, s) becomes the state over both sets of keys, in the rows where `mask` [tokens] is True (None: in all)."""
    out, lse = merge_state(v, s, v_other, s_other)
    if mask is not None:
        rows = mask.to(torch.bool)[:, None]
        out, lse = torch.where(rows[..., None], out, v), torch.where(rows, lse, s.float())
    v.copy_(out)
    s.copy_(lse)


def merge_states(v: Tensor, s: Tensor) -> tuple[Output, LogSumExp]:
    """The state over all sets of keys: v [tokens, states, heads, dim], s [tokens, states, heads]."""
    s = s.float()
    return merge([(v[:, i], s[:, i]) for i in range(v.shape[1])])
