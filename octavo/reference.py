"""The one oracle: dense attention in float64 on the CPU, row by row as the contract reads. Slow on purpose.

out = softmax(sm_scale q k^T) v and lse = log2(sum(exp(sm_scale q k^T))) over the keys that a row sees
(Vaswani et al. 2017, eq. 1; lse in base 2 as FlashInfer has it). A row that sees no key: out 0, lse -inf.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch

from octavo.problem import AttentionSpec, PagedBatch
from octavo.shapes import KeyCache, Queries, Tensor, ValueCache

LOG2_E = math.log2(math.e)


def sequence_lengths(batch: PagedBatch, page_size: int) -> tuple[list[int], list[int]]:
    """(q_lens, kv_lens) as Python ints; reads the index tensors, so it synchronises on a GPU."""
    qo = batch.qo_indptr.tolist()
    q_lens = [b - a for a, b in pairwise(qo)]
    if batch.kv_lens is not None:
        return q_lens, batch.kv_lens.tolist()
    assert batch.kv_indptr is not None
    ptr = batch.kv_indptr.tolist()
    pages = [b - a for a, b in pairwise(ptr)]
    last = [page_size] * len(pages) if batch.last_page_len is None else batch.last_page_len.tolist()
    return q_lens, [(n - 1) * page_size + r if n else 0 for n, r in zip(pages, last, strict=True)]


def page_ids(batch: PagedBatch, sequence: int, num_pages: int) -> Tensor:
    """The first `num_pages` page ids of one sequence, int64."""
    if batch.is_dense:
        return batch.page_table[sequence, :num_pages].long()
    assert batch.kv_indptr is not None
    start = int(batch.kv_indptr[sequence])
    return batch.page_table[start : start + num_pages].long()


def gather_pages(cache: Tensor, ids: Tensor, num_keys: int) -> Tensor:
    """[num_keys, kv_heads, dim] of one sequence."""
    return cache[ids].flatten(0, 1)[:num_keys]


def reference(
    spec: AttentionSpec,
    q: Queries,
    k_cache: KeyCache,
    v_cache: ValueCache,
    batch: PagedBatch,
    sm_scale: float | Tensor | None = None,
    rows: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) in float64 on the CPU, for all token rows or for `rows` only (then in that order).

    Keys that a row does not see are not read for it, so poison there cannot reach the result.
    Token rows past qo_indptr[-1] belong to no sequence and see no key.
    """
    batch = batch.to("cpu")
    scale = spec.default_scale if sm_scale is None else float(sm_scale)
    wanted = list(range(q.shape[0])) if rows is None else list(rows)
    out = torch.zeros(len(wanted), spec.num_qo_heads, spec.v_dim, dtype=torch.float64)
    lse = torch.full((len(wanted), spec.num_qo_heads), -math.inf, dtype=torch.float64)
    q_lens, kv_lens = sequence_lengths(batch, spec.page_size)
    start = 0
    for sequence, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        mine = [(i, row - start) for i, row in enumerate(wanted) if start <= row < start + q_len]
        if mine and kv_len:
            ids = page_ids(batch, sequence, -(-kv_len // spec.page_size)).to(k_cache.device)
            k = gather_pages(k_cache, ids, kv_len).cpu().double()
            v = gather_pages(v_cache, ids, kv_len).cpu().double()
            for i, token in mine:
                seen = seen_keys(spec, q_len, kv_len, token)
                if seen:
                    row = q[start + token].cpu().double()
                    out[i], lse[i] = attend_row(row, k[:seen], v[:seen], scale)
        start += q_len
    return out, lse


def seen_keys(spec: AttentionSpec, q_len: int, kv_len: int, token: int) -> int:
    """Keys that a query token sees, bottom-right aligned where causal."""
    return min(max(token + kv_len - q_len + 1, 0), kv_len) if spec.causal else kv_len


def attend_row(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """One token's heads [Hq, D] over keys [n, Hkv, D] and values [n, Hkv, Dv]."""
    grouped = q.view(k.shape[1], -1, q.shape[-1])
    logits = torch.einsum("hgd,nhd->hgn", grouped, k) * scale
    lse = torch.logsumexp(logits, dim=-1)
    out = torch.einsum("hgn,nhv->hgv", torch.exp(logits - lse[..., None]), v)
    return out.reshape(q.shape[0], -1), (lse * LOG2_E).reshape(-1)


def merge_reference(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge attention states over disjoint key sets: float64 (out, base-2 lse). Empty states (lse -inf) are neutral."""
    s = torch.stack([x.cpu().double() for x in lses])
    top = s.amax(0)
    weights = torch.exp2(s - torch.where(top == -math.inf, torch.zeros_like(top), top))
    total = weights.sum(0)
    v = torch.stack([x.cpu().double() for x in outs])
    mixed = torch.where(weights[..., None] > 0, v * weights[..., None], torch.zeros_like(v)).sum(0)
    empty = total == 0
    out = torch.where(empty[..., None], torch.zeros_like(mixed), mixed / torch.where(empty, 1.0, total)[..., None])
    return out, torch.where(empty, -math.inf, torch.log2(total) + top)
