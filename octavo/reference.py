"""The one oracle: dense attention in float64 on the CPU, row by row as the contract reads. Slow on purpose.

out = softmax(sm_scale q k^T) v and lse = log2(sum(exp(sm_scale q k^T))) over the keys that a row sees
(Vaswani et al. 2017, eq. 1; lse in base 2 as FlashInfer has it). A row that sees no key: out 0, lse -inf.
Variants: the logits are cap * tanh((sm_scale q k^T + alibi) / cap), and a sink is one more logit without a value.
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
    **values: Tensor | float | None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) in float64 on the CPU, for all token rows or for `rows` only (then in that order).

    Keys that a row does not see are not read for it, so poison there cannot reach the result.
    Token rows past qo_indptr[-1] belong to no sequence and see no key.
    values: sinks, alibi_slopes, k_scale, v_scale, of the variants that the spec names.
    """
    batch = batch.to("cpu").with_mask_indptr(spec.page_size)
    scale = spec.default_scale if sm_scale is None else float(sm_scale)
    sinks, slopes, k_scale, v_scale = (_exact(values.get(n)) for n in ("sinks", "alibi_slopes", "k_scale", "v_scale"))
    wanted = list(range(q.shape[0])) if rows is None else list(rows)
    out = torch.zeros(len(wanted), spec.num_qo_heads, spec.v_dim, dtype=torch.float64)
    lse = torch.full((len(wanted), spec.num_qo_heads), -math.inf, dtype=torch.float64)
    if sinks is not None:
        lse[:] = sinks * LOG2_E
    q_lens, kv_lens = sequence_lengths(batch, spec.page_size)
    start = 0
    for sequence, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        mine = [(i, row - start) for i, row in enumerate(wanted) if start <= row < start + q_len]
        if mine and kv_len:
            ids = page_ids(batch, sequence, -(-kv_len // spec.page_size)).to(k_cache.device)
            k = scaled(gather_pages(k_cache, ids, kv_len), k_scale)
            v = scaled(gather_pages(v_cache, ids, kv_len), v_scale)
            mask = mask_of(batch, sequence, q_len, kv_len) if spec.custom_mask else None
            for i, token in mine:
                seen = visible_keys(spec, q_len, kv_len, token, None if mask is None else mask[token])
                if len(seen):
                    row = q[start + token].cpu().double()
                    distance = (seen - (kv_len - q_len + token)).double()
                    bias = None if slopes is None else slopes[:, None] * distance
                    # Without a mask they follow each other: a slice copies nothing.
                    at = seen if mask is not None else slice(int(seen[0]), int(seen[-1]) + 1)
                    out[i], lse[i] = attend_row(row, k[at], v[at], scale, bias, spec.logits_soft_cap, sinks)
        start += q_len
    return out, lse


def scaled(x: Tensor, scale: Tensor | None) -> Tensor:
    """Keys or values [n, Hkv, dim] in float64 on the CPU, times a scale, one or one per head."""
    x = x.cpu().double()
    return x if scale is None else x * scale.reshape(-1, 1)


def _exact(x: Tensor | float | None) -> Tensor | None:
    return None if x is None else torch.as_tensor(x).cpu().double()


def mask_of(batch: PagedBatch, sequence: int, q_len: int, kv_len: int) -> Tensor:
    """[q_len, kv_len] bool: the custom mask of one sequence of a batch on the CPU that has mask_indptr."""
    assert batch.custom_mask is not None and batch.mask_indptr is not None
    start, count = int(batch.mask_indptr[sequence]), q_len * kv_len
    if batch.custom_mask.dtype == torch.bool:
        return batch.custom_mask[start : start + count].view(q_len, kv_len)
    packed = batch.custom_mask[start : start + (count + 7) // 8]
    bits = packed[:, None] >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.flatten()[:count].bool().view(q_len, kv_len)


def visible_keys(spec: AttentionSpec, q_len: int, kv_len: int, token: int, mask: Tensor | None = None) -> Tensor:
    """Positions of the keys that a query token sees, int64, rising. mask [kv_len] bool: its row of the custom mask."""
    low, high = seen_range(spec, q_len, kv_len, token)
    keys = torch.arange(low, high)
    return keys if mask is None else keys[mask[low:high]]


def seen_range(spec: AttentionSpec, q_len: int, kv_len: int, token: int) -> tuple[int, int]:
    """Keys [low, high) within causal and windows, of a query token at position kv_len - q_len + token."""
    position, low, high = kv_len - q_len + token, 0, kv_len
    if spec.causal and not spec.custom_mask:
        high = min(high, position + 1)
    if spec.window_left >= 0:
        low = max(low, position - spec.window_left)
    if spec.window_right >= 0:
        high = min(high, position + spec.window_right + 1)
    low = min(low, kv_len)
    return low, max(high, low)


def seen_keys(spec: AttentionSpec, q_len: int, kv_len: int, token: int) -> int:
    """How many keys a query token sees, where no custom mask hides some of them."""
    low, high = seen_range(spec, q_len, kv_len, token)
    return high - low


def attend_row(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    bias: Tensor | None = None,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One token's heads [Hq, D] over the keys [n, Hkv, D] that it sees and their values [n, Hkv, Dv].

    bias: [Hq, n] added to the scaled logits, before they are capped. sinks: [Hq] logits without a value.
    """
    grouped = q.view(k.shape[1], -1, q.shape[-1])
    logits = torch.einsum("hgd,nhd->hgn", grouped, k).flatten(0, 1) * scale
    if bias is not None:
        logits = logits + bias
    if soft_cap > 0:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    lse = torch.logsumexp(logits, dim=-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks)
    weights = torch.exp(logits - lse[:, None]).view(k.shape[1], -1, k.shape[0])
    out = torch.einsum("hgn,nhv->hgv", weights, v)
    return out.reshape(q.shape[0], -1), lse * LOG2_E


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
