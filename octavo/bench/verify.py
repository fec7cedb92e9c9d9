"""The one tolerance rule: off from float64 by at most twice what PyTorch's own attention is off, plus one rounding.

Nothing is tuned by hand: PyTorch computes the same rows in the same dtype, and its error sets the scale.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from octavo.kv_cache import PagedKV
from octavo.problem import AttentionSpec, PagedBatch
from octavo.reference import LOG2_E, gather_pages, page_ids, reference, sequence_lengths
from octavo.shapes import LogSumExp, Output, Queries, Tensor

PEER_FACTOR = 2.0
LOG2_ROUNDING = 2.0**-22
"""Relative error of the loosest float32 log2 in use (PTX lg2.approx)."""


@dataclass(frozen=True)
class Verdict:
    """What a comparison found."""

    ok: bool
    rows: int
    """Token rows compared, all heads each."""
    dead_rows: int
    """Those among them that see no key."""
    worst: float
    """Largest error as a share of what the rule allows; inf where a value is not finite or a dead row is not empty."""
    message: str = ""
    """The first wrong row: what was expected, what came. Empty when ok."""


@dataclass(frozen=True)
class _Row:
    """One token row in the coordinates of its sequence."""

    row: int
    sequence: int
    token: int
    seen: int


def locate_rows(spec: AttentionSpec, batch: PagedBatch, rows: Sequence[int]) -> list[_Row]:
    """Sequence, token in it and keys seen of each row; rows past qo_indptr[-1] get sequence -1 and see nothing."""
    q_lens, kv_lens = sequence_lengths(batch, spec.page_size)
    ends = torch.tensor(q_lens, dtype=torch.int64).cumsum(0)
    wanted = torch.tensor(list(rows), dtype=torch.int64)
    located = []
    for row, sequence in zip(wanted.tolist(), torch.searchsorted(ends, wanted, right=True).tolist(), strict=True):
        if sequence == len(q_lens):
            located.append(_Row(row, -1, 0, 0))
            continue
        token = row - (int(ends[sequence]) - q_lens[sequence])
        located.append(_Row(row, sequence, token, seen_keys(spec, q_lens[sequence], kv_lens[sequence], token)))
    return located


def seen_keys(spec: AttentionSpec, q_len: int, kv_len: int, token: int) -> int:
    """Keys that a query token sees, bottom-right aligned where causal."""
    return min(max(token + kv_len - q_len + 1, 0), kv_len) if spec.causal else kv_len


def verify_rows(
    spec: AttentionSpec,
    q: Queries,
    kv: PagedKV,
    batch: PagedBatch,
    out: Output,
    lse: LogSumExp,
    rows: Sequence[int],
    sm_scale: float | None = None,
) -> Verdict:
    """Compare token rows of (out, lse) with the float64 oracle under the tolerance rule.

    A row that sees no key must be exactly 0 and -inf. Every other row, taken over all its heads:
    |out - exact| <= 2 |PyTorch's own out - exact| + one rounding of out's dtype, and the same for lse in float32, where
    the rounding is that of each product in the longest logit.

    Args:
        q, kv, batch, out, lse: one call and its result, on one device.
        rows: token rows to compare, padding rows past qo_indptr[-1] included if wanted.
        sm_scale: None means 1 / sqrt(head_dim).
    """
    scale = spec.default_scale if sm_scale is None else float(sm_scale)
    shape = (q.shape[0], spec.num_qo_heads, spec.v_dim)
    if tuple(out.shape) != shape or tuple(lse.shape) != shape[:2] or out.dtype != q.dtype:
        got = f"out {list(out.shape)} {out.dtype}, lse {list(lse.shape)}"
        return Verdict(False, 0, 0, math.inf, f"expected out {list(shape)} {q.dtype}, lse {list(shape[:2])}, got {got}")
    exact_out, exact_lse = reference(spec, q, kv.k_cache, kv.v_cache, batch, scale, rows=rows)
    located = locate_rows(spec, batch, rows)
    peer = _Peer(spec, q, kv, batch.to("cpu"), scale)
    worst, failures = 0.0, []
    index = torch.tensor([r.row for r in located], dtype=torch.int64, device=out.device)
    got_out, got_lse = out[index].cpu().double(), lse[index].cpu().double()
    for i, row in enumerate(located):
        if row.seen == 0:
            ratio, why = _judge_dead(got_out[i], got_lse[i])
        else:
            ratio, why = peer.judge(row, got_out[i], got_lse[i], exact_out[i], exact_lse[i])
        worst = max(worst, ratio)
        if why:
            failures.append(f"row {row.row} (sequence {row.sequence}, query {row.token}, sees {row.seen} keys): {why}")
    message = f"{len(failures)} of {len(located)} rows wrong; {failures[0]}" if failures else ""
    return Verdict(not failures, len(located), sum(r.seen == 0 for r in located), worst, message)


def _judge_dead(out: Tensor, lse: Tensor) -> tuple[float, str]:
    if bool((out == 0).all()) and bool((lse == -math.inf).all()):
        return 0.0, ""
    return math.inf, f"expected out 0 and lse -inf, got out up to {out.abs().max():.3g}, lse {lse.flatten()[0]:.3g}"


class _Peer:
    """PyTorch's attention on single rows, keys of the sequence at hand kept gathered."""

    def __init__(self, spec: AttentionSpec, q: Tensor, kv: PagedKV, batch: PagedBatch, scale: float) -> None:
        self.spec, self.q, self.kv, self.batch, self.scale = spec, q, kv, batch, scale
        self.kv_lens = sequence_lengths(batch, spec.page_size)[1]
        self.sequence = -1
        self.k = self.v = q

    def judge(self, row: _Row, out: Tensor, lse: Tensor, exact_out: Tensor, exact_lse: Tensor) -> tuple[float, str]:
        """(error as a share of the limit, why it is wrong or "")."""
        if not (bool(torch.isfinite(out).all()) and bool(torch.isfinite(lse).all())):
            return math.inf, "expected finite values, got NaN or Inf"
        peer_out, peer_lse, longest = self._attend(row)
        rounding = torch.finfo(self.spec.dtype).eps / 2
        limit = _limit(peer_out, exact_out, rounding * float(exact_out.abs().max()))
        products = self.spec.head_dim * torch.finfo(torch.float32).eps / 2 * longest
        log2 = LOG2_ROUNDING * max(1.0, float(exact_lse.abs().max()))
        lse_limit = _limit(peer_lse, exact_lse, products + log2)
        worst, why = 0.0, ""
        for name, got, exact, allowed in (("out", out, exact_out, limit), ("lse", lse, exact_lse, lse_limit)):
            error = float((got - exact).abs().max())
            worst = max(worst, error / allowed if allowed else (math.inf if error else 0.0))
            if error > allowed:
                why = why or f"{name} off by {error:.3g}, allowed {allowed:.3g}"
        return worst, why

    def _attend(self, row: _Row) -> tuple[Tensor, Tensor, float]:
        """PyTorch's (out, lse) of one row, and the largest sum of |q k| in one of its logits, in units of lse."""
        self._gather(row.sequence)
        k, v, q = self.k[: row.seen], self.v[: row.seen], self.q[row.row]
        # A negative scale is folded into q, which is exact: fused softmax takes its maximum before scaling.
        signed = -q if self.scale < 0 else q
        keys_first, values_first = (x.transpose(0, 1)[None] for x in (k, v))
        out = scaled_dot_product_attention(
            signed[None, :, None], keys_first, values_first, scale=abs(self.scale), enable_gqa=True
        )
        grouped = q.float().view(self.spec.num_kv_heads, self.spec.group_size, -1)
        keys = k.float().permute(1, 2, 0)
        lse = torch.logsumexp(torch.matmul(grouped, keys) * self.scale, dim=-1) * LOG2_E
        longest = float(torch.matmul(grouped.abs(), keys.abs()).max()) * abs(self.scale) * LOG2_E
        return out[0, :, 0].cpu().double(), lse.flatten().cpu().double(), longest

    def _gather(self, sequence: int) -> None:
        if sequence != self.sequence:
            kv_len = self.kv_lens[sequence]
            ids = page_ids(self.batch, sequence, -(-kv_len // self.spec.page_size)).to(self.q.device)
            self.k, self.v = (gather_pages(x, ids, kv_len) for x in (self.kv.k_cache, self.kv.v_cache))
            self.sequence = sequence


def _limit(peer: Tensor, exact: Tensor, rounding: float) -> float:
    error = float((peer - exact).abs().max())
    return PEER_FACTOR * (error if math.isfinite(error) else 0.0) + rounding
