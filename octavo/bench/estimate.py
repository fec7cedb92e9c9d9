"""Every row of a batch in float32 on its device: not the judge, but it tells which rows the judge should look at."""

import math
from collections.abc import Iterator

import torch

from octavo.bench.workloads import Inputs
from octavo.reference import LOG2_E, gather_pages, page_ids, sequence_lengths
from octavo.shapes import LogSumExp, Output, Tensor

_MAX_LOGITS = 1 << 28
"""Logits held at once: 1 GiB."""


def estimate(inputs: Inputs) -> tuple[Output, LogSumExp]:
    """(out, lse) in float32, from plain matrix products over gathered K/V."""
    spec, q = inputs.spec, inputs.q
    out = torch.zeros((q.shape[0], spec.num_qo_heads, spec.v_dim), dtype=torch.float32, device=q.device)
    lse = torch.full(out.shape[:2], -math.inf, device=q.device)
    q_lens, kv_lens = sequence_lengths(inputs.batch, spec.page_size)
    start = 0
    for sequence, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        if q_len and kv_len:
            ids = page_ids(inputs.batch, sequence, -(-kv_len // spec.page_size))
            k, v = (gather_pages(x, ids, kv_len).float() for x in (inputs.kv.k_cache, inputs.kv.v_cache))
            for first, last in _chunks(q_len, kv_len * spec.num_qo_heads):
                rows = slice(start + first, start + last)
                seen = kv_len - q_len + torch.arange(first, last, device=q.device) + 1
                if not spec.causal:
                    seen = torch.full_like(seen, kv_len)
                out[rows], lse[rows] = _attend(q[rows].float(), k, v, seen, spec.default_scale)
        start += q_len
    return out, lse


def _chunks(q_len: int, logits_per_row: int) -> Iterator[tuple[int, int]]:
    step = max(1, _MAX_LOGITS // logits_per_row)
    for first in range(0, q_len, step):
        yield first, min(q_len, first + step)


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Rows q [n, Hq, D] over k, v [m, Hkv, D]; row i sees the first seen[i] keys."""
    rows, kv_heads = q.shape[0], k.shape[1]
    grouped = q.view(rows, kv_heads, -1, q.shape[2]).permute(1, 0, 2, 3).flatten(1, 2)
    logits = torch.matmul(grouped, k.permute(1, 2, 0)).mul_(scale).view(kv_heads, rows, -1, k.shape[0])
    hidden = torch.arange(k.shape[0], device=q.device) >= seen[:, None]
    logits.masked_fill_(hidden[None, :, None], -math.inf)
    lse = torch.logsumexp(logits, dim=-1)
    weights = logits.sub_(torch.where(lse == -math.inf, 0.0, lse)[..., None]).exp_()
    out = torch.matmul(weights.flatten(1, 2), v.transpose(0, 1)).view(kv_heads, rows, -1, v.shape[2])
    return out.transpose(0, 1).flatten(1, 2), lse.transpose(0, 1).flatten(1, 2) * LOG2_E


def furthest_rows(got: Tensor, wanted: Tensor, count: int) -> list[int]:
    """The `count` rows of got that are the furthest from `wanted`, relative to each row's largest value there."""
    finite = torch.where(torch.isfinite(wanted), wanted, 0.0).flatten(1).abs().amax(1)
    distance = torch.where(got == wanted, 0.0, (got - wanted).abs()).nan_to_num(math.inf, math.inf)
    ratio = distance.flatten(1).amax(1) / finite.clamp_min(torch.finfo(torch.float32).tiny)
    return ratio.nan_to_num(math.inf).topk(min(count, len(ratio))).indices.tolist()
