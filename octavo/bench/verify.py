"""The one tolerance rule: off from float64 by at most twice what PyTorch's own attention is off, plus one rounding.

Nothing is tuned by hand: PyTorch computes the same rows in the same dtype, and its error sets the scale.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from octavo.kv_cache import PagedKV
from octavo.problem import AttentionSpec, PagedBatch
from octavo.reference import LOG2_E, gather_pages, page_ids, reference, seen_keys, sequence_lengths
from octavo.shapes import LogSumExp, Output, Queries, Tensor

PEER_FACTOR = 2.0
MASK_ELEMENTS = 1 << 19
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

    A row that sees no key must be exactly 0 and -inf. Every other row, with |x| the largest over all its heads:
    |out - exact| <= |exact| (2 PyTorch's error, relative to its |exact|, + one rounding of out's dtype), and
    |lse - exact| <= 2 PyTorch's error + a float32 rounding of each product in the longest logit.
    PyTorch's errors are the largest among the rows compared: on single rows they come and go with how vectors fall.

    Args:
        q, kv, batch, out, lse: one call and its result, on one device.
        rows: token rows to compare, padding rows past qo_indptr[-1] included if wanted.
        sm_scale: None means 1 / sqrt(head_dim).
    """
    return Oracle(spec, q, kv, batch, sm_scale).verify(out, lse, rows)


class Oracle:
    """What rows of one call must be. A row is computed once, however many results are compared with it."""

    def __init__(
        self, spec: AttentionSpec, q: Queries, kv: PagedKV, batch: PagedBatch, sm_scale: float | None = None
    ) -> None:
        self.spec, self.q, self.kv, self.batch = spec, q, kv, batch
        self.scale = spec.default_scale if sm_scale is None else float(sm_scale)
        self._rows: dict[int, _Exact] = {}

    def verify(self, out: Output, lse: LogSumExp, rows: Sequence[int], lse_slack: float = 0.0) -> Verdict:
        """See `verify_rows`; lse may be off by lse_slack more."""
        shape = (self.q.shape[0], self.spec.num_qo_heads, self.spec.v_dim)
        if tuple(out.shape) != shape or tuple(lse.shape) != shape[:2] or out.dtype != self.q.dtype:
            got = f"out {list(out.shape)} {out.dtype}, lse {list(lse.shape)}"
            wanted = f"out {list(shape)} {self.q.dtype}, lse {list(shape[:2])}"
            return Verdict(False, 0, 0, math.inf, f"expected {wanted}, got {got}")
        exact = self.exact(rows)
        index = torch.tensor([e.at.row for e in exact], dtype=torch.int64, device=out.device)
        got_out, got_lse = out[index].cpu().double(), lse[index].cpu().double()
        limits = _combined({i: e.limits for i, e in enumerate(exact) if e.limits is not None}, self.spec.dtype)
        limits = {i: (of_out, of_lse + lse_slack) for i, (of_out, of_lse) in limits.items()}
        worst, failures = 0.0, []
        for i, (e, row) in enumerate((e, e.at) for e in exact):
            if i in limits:
                ratio, why = _judge((got_out[i] - e.out, got_lse[i] - e.lse), limits[i])
            else:
                ratio, why = _judge_dead(got_out[i], got_lse[i])
            worst = max(worst, ratio)
            if why:
                place = f"sequence {row.sequence}, query {row.token}, sees {row.seen} keys"
                failures.append(f"row {row.row} ({place}): {why}")
        message = f"{len(failures)} of {len(exact)} rows wrong; {failures[0]}" if failures else ""
        return Verdict(not failures, len(exact), sum(e.at.seen == 0 for e in exact), worst, message)

    def exact(self, rows: Sequence[int]) -> "list[_Exact]":
        """One entry per row, in order."""
        self._compute([row for row in dict.fromkeys(rows) if row not in self._rows])
        return [self._rows[row] for row in rows]

    def _compute(self, rows: list[int]) -> None:
        if not rows:
            return
        k, v = self.kv.k_cache, self.kv.v_cache
        out, lse = reference(self.spec, self.q, k, v, self.batch, self.scale, rows=rows)
        located = locate_rows(self.spec, self.batch, rows)
        peer = _Peer(self.spec, self.q, self.kv, self.batch.to("cpu"), self.scale)
        limits = peer.limits([(i, r) for i, r in enumerate(located) if r.seen], out, lse)
        for i, row in enumerate(located):
            self._rows[row.row] = _Exact(row, out[i], lse[i], limits.get(i))


def _combined(measured: dict[int, "_Limits"], dtype: torch.dtype) -> dict[int, tuple[float, float]]:
    """Largest allowed errors of out and lse, per row."""
    peer_out = max((x.peer_out for x in measured.values()), default=0.0)
    peer_lse = max((x.peer_lse for x in measured.values()), default=0.0)
    relative = PEER_FACTOR * peer_out + torch.finfo(dtype).eps / 2
    return {i: (x.size * relative, PEER_FACTOR * peer_lse + x.lse) for i, x in measured.items()}


def _judge_dead(out: Tensor, lse: Tensor) -> tuple[float, str]:
    if bool((out == 0).all()) and bool((lse == -math.inf).all()):
        return 0.0, ""
    return math.inf, f"expected out 0 and lse -inf, got out up to {out.abs().max():.3g}, lse {lse.flatten()[0]:.3g}"


def _judge(errors: tuple[Tensor, Tensor], limits: tuple[float, float]) -> tuple[float, str]:
    """(largest error as a share of its limit, why that is wrong or "") of one row's out and lse."""
    worst, why = 0.0, ""
    for name, error, allowed in zip(("out", "lse"), errors, limits, strict=True):
        largest = float(error.abs().max())
        if not math.isfinite(largest):
            return math.inf, f"{name}: expected finite values, got NaN or Inf"
        worst = max(worst, largest / allowed if allowed else (math.inf if largest else 0.0))
        if largest > allowed:
            why = why or f"{name} off by {largest:.3g}, allowed {allowed:.3g}"
    return worst, why


@dataclass(frozen=True)
class _Limits:
    """What the limits of one row are made of."""

    size: float
    """Largest |exact out|."""
    peer_out: float
    """Error of PyTorch's out, relative to size."""
    peer_lse: float
    """Error of PyTorch's lse."""
    lse: float
    """Roundings that lse may have."""


@dataclass(frozen=True, eq=False)
class _Exact:
    """One row in float64, and what a result is held to there; no limits where the row sees no key."""

    at: _Row
    out: Tensor
    lse: Tensor
    limits: _Limits | None


class _Peer:
    """PyTorch's attention over the same rows, those of a sequence together under a mask, and how far it is off."""

    def __init__(self, spec: AttentionSpec, q: Tensor, kv: PagedKV, batch: PagedBatch, scale: float) -> None:
        self.spec, self.kv, self.batch, self.scale = spec, kv, batch, scale
        # A negative scale is folded into q, which is exact: fused softmax takes its maximum before scaling.
        self.q = -q if scale < 0 else q
        self.kv_lens = sequence_lengths(batch, spec.page_size)[1]

    def limits(self, rows: list[tuple[int, _Row]], exact_out: Tensor, exact_lse: Tensor) -> dict[int, _Limits]:
        """For each (index into exact_out and exact_lse, row that sees keys): what the row is held to."""
        found = {}
        for sequence, group in groupby(sorted(rows, key=_by_sequence), key=lambda r: r[1].sequence):
            k, v = self._gather(sequence)
            for chunk in _chunks(list(group)):
                index = [i for i, _ in chunk]
                results = zip(index, *self._attend([row for _, row in chunk], k, v), strict=True)
                for i, out, lse, longest in results:
                    found[i] = self._limits(out, lse, float(longest), exact_out[i], exact_lse[i])
        return found

    def _limits(self, out: Tensor, lse: Tensor, longest: float, exact_out: Tensor, exact_lse: Tensor) -> _Limits:
        size = float(exact_out.abs().max())
        products = self.spec.head_dim * torch.finfo(torch.float32).eps / 2 * longest
        log2 = LOG2_ROUNDING * max(1.0, float(exact_lse.abs().max()))
        peer_out = _error(out, exact_out) / size if size else 0.0
        return _Limits(size, peer_out, _error(lse, exact_lse), products + log2)

    def _gather(self, sequence: int) -> tuple[Tensor, Tensor]:
        """K and V of one sequence, [kv_heads, keys, dim]; NaN and Inf become 0: a mask does not keep them out."""
        kv_len = self.kv_lens[sequence]
        ids = page_ids(self.batch, sequence, -(-kv_len // self.spec.page_size)).to(self.q.device)
        k, v = (gather_pages(x, ids, kv_len).transpose(0, 1) for x in (self.kv.k_cache, self.kv.v_cache))
        return torch.nan_to_num(k, 0.0, 0.0, 0.0), torch.nan_to_num(v, 0.0, 0.0, 0.0)

    def _attend(self, rows: list[_Row], k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(out [rows, heads, value_dim], lse [rows, heads], largest sum of |q k| in a logit [rows], in lse units)."""
        n = max(row.seen for row in rows)
        k, v = k[:, :n], v[:, :n]
        heads, group = self.spec.num_kv_heads, self.spec.group_size
        q = self.q[[row.row for row in rows]].unflatten(1, (heads, group)).transpose(0, 1).flatten(1, 2)
        seen = torch.tensor([row.seen for row in rows], device=q.device).repeat_interleave(group)
        hidden = torch.arange(n, device=q.device) >= seen[:, None]
        attention = _cpu_attention if q.device.type == "cpu" else _gpu_attention
        out, lse = attention(q, k, v, hidden, abs(self.scale))
        sums = torch.matmul(q.float().abs(), k.float().abs().transpose(1, 2)).masked_fill(hidden, 0.0)
        longest = sums.amax(-1) * (abs(self.scale) * LOG2_E)
        by_row = [x.cpu().double().unflatten(1, (len(rows), group)).transpose(0, 1) for x in (out, lse, longest)]
        return by_row[0].flatten(1, 2), by_row[1].flatten(1, 2), by_row[2].flatten(1).amax(-1)


def _by_sequence(row: tuple[int, _Row]) -> tuple[int, int]:
    return row[1].sequence, row[1].seen


def _chunks(rows: list[tuple[int, _Row]]) -> Iterator[list[tuple[int, _Row]]]:
    """Rows, ascending in keys seen, in runs whose mask stays small."""
    start = 0
    for end in range(1, len(rows) + 1):
        if end == len(rows) or (end + 1 - start) * rows[end][1].seen > MASK_ELEMENTS:
            yield rows[start:end]
            start = end


def _cpu_attention(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """PyTorch's (out, base-2 lse) of q [kv_heads, rows, dim] over k, v [kv_heads, keys, dim], padded alike."""
    width = max(q.shape[-1], v.shape[-1])
    padded = [pad(x, (0, width - x.shape[-1]))[None] for x in (q, k, v)]
    mask = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill_(hidden, -math.inf)
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = fused(*padded, attn_mask=mask, scale=scale)
    return out[0, ..., : v.shape[-1]], lse[0] * LOG2_E


def _gpu_attention(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The same on a GPU, where PyTorch gives no lse: it comes from float32 logits."""
    out = scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=~hidden, scale=scale)[0]
    logits = torch.matmul(q.float(), k.float().transpose(1, 2)) * scale
    return out, torch.logsumexp(logits.masked_fill(hidden, -math.inf), dim=-1) * LOG2_E


def _error(peer: Tensor, exact: Tensor) -> float:
    """PyTorch's error; where it fails altogether it excuses nothing."""
    error = float((peer - exact).abs().max())
    return error if math.isfinite(error) else 0.0
