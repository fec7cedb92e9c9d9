"""The tolerance rule: error against float64 at most twice that of PyTorch's own attention plus one rounding of the output."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from inputs import Problem
from octavo.reference import LOG2_E, gather_pages, page_ids, sequence_lengths


def assert_matches(p: Problem, out: Tensor, lse: Tensor, rows: list[int] | None = None) -> None:
    """(out, lse) of a whole call, or of `rows` of it, against the oracle under the tolerance rule."""
    expected_out, expected_lse = p.expected(rows)
    assert out.dtype == p.q.dtype and lse.dtype == torch.float32
    assert out.device == p.q.device and lse.device == p.q.device
    out, lse = out.cpu(), lse.cpu()
    assert out.shape == expected_out.shape and lse.shape == expected_lse.shape
    assert not out.isnan().any(), f"NaN in out, rows {_rows(out.isnan())}"
    assert not lse.isnan().any(), f"NaN in lse, rows {_rows(lse.isnan())}"
    dead = expected_lse == -math.inf
    wrong = (lse == -math.inf) != dead
    assert not wrong.any(), f"lse is -inf where keys are seen, or finite where none is: rows {_rows(wrong)}"
    assert not out[dead].any(), f"out is not 0 in rows that see no key: rows {_rows((out != 0) & dead[..., None])}"
    limit_out, limit_lse = limits(p, expected_out, expected_lse, rows)
    _assert_within("out", out, expected_out, limit_out)
    live = ~dead
    _assert_within("lse", lse[live], expected_lse[live], limit_lse[live])


def _rows(bad: Tensor) -> list[int]:
    return bad.flatten(1).any(1).nonzero().flatten().tolist()[:10]


def _assert_within(name: str, got: Tensor, expected: Tensor, limit: Tensor) -> None:
    error = (got.double() - expected).abs()
    over = error - limit
    if over.numel() and over.max() > 0:
        i = int(over.argmax())
        where = [int(n) for n in torch.unravel_index(torch.tensor(i), over.shape)]
        raise AssertionError(
            f"{name}{where}: expected {expected.flatten()[i]:.8g} within {limit.flatten()[i]:.3g}, "
            f"got {got.flatten()[i]:.8g}; {int((over > 0).sum())} of {over.numel()} elements are off"
        )


def limits(p: Problem, out: Tensor, lse: Tensor, rows: list[int] | None) -> tuple[Tensor, Tensor]:
    """Largest allowed error of each element of out and lse, given the float64 results."""
    spec, batch = p.spec, p.batch.to("cpu")
    wanted = list(range(p.q.shape[0])) if rows is None else rows
    limit_out, limit_lse = torch.zeros_like(out), torch.zeros_like(lse)
    start = 0
    for sequence, (q_len, kv_len) in enumerate(zip(*sequence_lengths(batch, spec.page_size), strict=True)):
        mine = [i for i, row in enumerate(wanted) if start <= row < start + q_len]
        live = [i for i in mine if not spec.causal or wanted[i] - start + kv_len - q_len >= 0]
        if live and kv_len:
            q = p.q[[wanted[i] for i in live]]
            ids = page_ids(batch, sequence, -(-kv_len // spec.page_size)).to(q.device)
            k, v = (gather_pages(cache, ids, kv_len) for cache in (p.kv.k_cache, p.kv.v_cache))
            last = torch.tensor([wanted[i] - start + kv_len - q_len for i in live], device=q.device)
            see = torch.arange(kv_len, device=q.device)[None] <= last[:, None] if spec.causal else None
            torch_out, torch_lse, largest = _pytorch(p, q, k, v, see)
            limit_out[live] = 2 * (torch_out - out[live]).abs().max() + _rounding(p.q.dtype) * out[live].abs()
            limit_lse[live] = 2 * (torch_lse - lse[live]).abs().max() + _rounding(torch.float32) * largest
        start += q_len
    return limit_out + torch.finfo(p.q.dtype).tiny, limit_lse


def _rounding(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def _pytorch(p: Problem, q: Tensor, k: Tensor, v: Tensor, see: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """One sequence's out in its own precision and base-2 lse in float32, and what one rounding of that lse is relative to.

    A dot product's rounding error grows with the sum of the products' magnitudes, not with their sum.
    """
    scale = p.spec.default_scale if p.sm_scale is None else float(p.sm_scale)
    k, v = (x.repeat_interleave(p.spec.group_size, 1) for x in (k, v))
    heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(*heads_first, attn_mask=see, scale=scale)[0].transpose(0, 1)
    logits = torch.einsum("thd,nhd->thn", q.float(), k.float()) * (scale * LOG2_E)
    magnitude = torch.einsum("thd,nhd->thn", q.float().abs(), k.float().abs()) * abs(scale * LOG2_E)
    if see is not None:
        logits = logits.masked_fill(~see[:, None], -math.inf)
        magnitude = magnitude.masked_fill(~see[:, None], 0)
    lse = torch.logsumexp(logits / LOG2_E, -1) * LOG2_E
    return out.double().cpu(), lse.double().cpu(), magnitude.amax(-1).clamp_min(1).double().cpu()
