"""Attention on the CPU: each sequence's pages read once, tiles of packed query rows through PyTorch's fused attention.

A tile holds consecutive tokens of one sequence, each with the query heads that share a K/V head, so K/V are read once per
K/V head and never repeated. All its rows see the keys before its first token; over the keys of its own tokens a mask of
fixed size makes the causal triangle. Where more keys come before a tile than that mask has columns, the two parts are
computed apart and merged.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch

from octavo.backends.base import AttentionCall
from octavo.backends.cpu_pages import PageReader, SequencePages, sequences_of
from octavo.shapes import Tensor

TILE_ROWS = 704
"""Rows per K/V head in a tile: from 192 to 767 rows PyTorch's kernel takes 64 at a time, enough tasks for many threads."""
TILE_TOKENS = 256
"""Tokens in a tile at most: on average half as many keys are computed in vain."""
MASKED_KEYS = 1024
"""Keys before a tile up to which masking them costs less than computing them apart and merging."""
MERGE_ELEMENTS = 1 << 18
"""Elements merged at a time, so that their float32 copies stay in the cache."""
LOG2_E = math.log2(math.e)


def attend(call: AttentionCall) -> None:
    """Write call.out and call.lse completely."""
    sequences = sequences_of(call.batch, call.spec.page_size)
    end = sequences[-1].start + sequences[-1].q_len if sequences else 0
    if end > call.q.shape[0]:
        raise ValueError(f"qo_indptr: expected at most {call.q.shape[0]} (rows of q) last, got {end}; fix: pad q")
    tiles = _Tiles(call, sequences)
    for sequence in sequences:
        tiles.attend(sequence)
    tiles.write_empty(end, call.q.shape[0])


class _Tiles:
    """One call, tile by tile."""

    def __init__(self, call: AttentionCall, sequences: Sequence[SequencePages]) -> None:
        spec = call.spec
        scale = call.sm_scale if call.scale_tensor is None else call.sm_scale * float(call.scale_tensor)
        # The sign goes into q: PyTorch's kernel may take a row's maximum before it scales.
        self.scale, self.negate = abs(scale), scale < 0
        self.causal, self.group, self.kv_heads = spec.causal, spec.group_size, spec.num_kv_heads
        self.dim, self.v_dim = max(spec.head_dim, spec.v_dim), spec.v_dim
        heads = (spec.num_kv_heads, spec.group_size)
        self.q, self.out = call.q.unflatten(1, heads), call.out.unflatten(1, heads)
        self.lse = call.lse.unflatten(1, heads)
        self.tokens = max(1, min(TILE_ROWS // self.group, TILE_TOKENS))
        max_pages = max((len(s.page_ids) for s in sequences if s.q_len), default=0)
        self.k_pages, self.v_pages = (PageReader(x, max_pages, self.dim) for x in (call.k_cache, call.v_cache))
        longest = max((min(s.q_len, s.kv_len) for s in sequences), default=0)
        before = max((s.kv_len for s in sequences if s.q_len), default=0)
        self.mask = self._mask(min(self.tokens, longest), min(before, MASKED_KEYS)) if self.causal else None

    def _mask(self, tokens: int, keys_before: int) -> Tensor | None:
        """[tokens x group, keys_before + tokens] of 0 and -inf: every smaller tile's mask is a slice of it."""
        if tokens <= 1:
            return None
        columns = keys_before + tokens
        mask = torch.full((tokens, columns), -math.inf, dtype=self.q.dtype).triu_(keys_before + 1)
        return mask[:, None].expand(tokens, self.group, columns).reshape(-1, columns)

    def attend(self, sequence: SequencePages) -> None:
        """All rows of one sequence."""
        live = min(sequence.q_len, sequence.kv_len) if self.causal else sequence.q_len * bool(sequence.kv_len)
        first = sequence.start + sequence.q_len - live
        self.write_empty(sequence.start, first)
        if not live:
            return
        k = self.k_pages.read(sequence.page_ids, sequence.kv_len)
        v = self.v_pages.read(sequence.page_ids, sequence.kv_len)
        if not self.causal or live == 1:
            return self._rows(first, live, k, v)
        before = sequence.kv_len - live
        poisoned = _not_finite(k[:, before + 1 :], v[:, before + 1 :])
        if not poisoned:
            return self._rows(first, live, k, v)
        self._rows(first, live, *(_zeroed(x, [before + i for i in poisoned]) for x in (k, v)))
        # Rows between two such keys see the same ones of them: no row meets one that it does not see.
        for low, high in pairwise([*poisoned, live]):
            self._rows(first + low, high - low, k[:, : before + high], v[:, : before + high])

    def _rows(self, first: int, count: int, k: Tensor, v: Tensor) -> None:
        """Rows [first, first + count); causal: the last of them sees all of k."""
        before = k.shape[1] - count
        for low in range(0, count, self.tokens):
            high = min(low + self.tokens, count)
            q = self._pack(first + low, first + high)
            seen = before + high if self.causal else k.shape[1]
            out, lse = self._tile(q, k[:, :seen], v[:, :seen], high - low)
            self._write(first + low, first + high, out, lse)

    def _tile(self, q: Tensor, k: Tensor, v: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """(out [kv_heads, rows, dim], base-2 lse [kv_heads, rows]) of the last `tokens` of the keys' tokens."""
        if not self.causal or tokens == 1:
            return self._fused(q, k, v)
        assert self.mask is not None
        rows, before = q.shape[1], k.shape[1] - tokens
        width = self.mask.shape[1] - self.mask.shape[0] // self.group
        if before <= width:
            return self._fused(q, k, v, self.mask[:rows, width - before : width + tokens])
        states = [
            self._fused(q, k[:, :before], v[:, :before]),
            self._fused(q, k[:, before:], v[:, before:], self.mask[:rows, width : width + tokens]),
        ]
        return merge_states([out for out, _ in states], [lse for _, lse in states])

    def _fused(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q[None], k[None], v[None], attn_mask=mask, scale=self.scale
        )
        return out[0], lse[0] * LOG2_E

    def _pack(self, low: int, high: int) -> Tensor:
        """Rows [low, high) as [kv_heads, tokens x group, dim], zeros past head_dim."""
        q = self.q[low:high].transpose(0, 1).flatten(1, 2)
        q = -q if self.negate else q
        padding = self.dim - q.shape[-1]
        return torch.nn.functional.pad(q, (0, padding)) if padding else q.contiguous()

    def _write(self, low: int, high: int, out: Tensor, lse: Tensor) -> None:
        shape = (high - low, self.group)
        self.out[low:high].copy_(out[..., : self.v_dim].unflatten(1, shape).transpose(0, 1))
        self.lse[low:high].copy_(lse.unflatten(1, shape).transpose(0, 1))

    def write_empty(self, low: int, high: int) -> None:
        """Rows [low, high) see no key."""
        if low < high:
            self.out[low:high].zero_()
            self.lse[low:high].fill_(-math.inf)


def _not_finite(k: Tensor, v: Tensor) -> list[int]:
    """1 + the positions of keys that hold NaN or Inf; a finite sum says at once that there are none."""
    if all(math.isfinite(float(x.sum())) for x in (k, v)):
        return []
    finite = k.isfinite().all(-1).all(0) & v.isfinite().all(-1).all(0)
    return [1 + i for i in (~finite).nonzero().flatten().tolist()]


def _zeroed(x: Tensor, keys: list[int]) -> Tensor:
    copy = x.clone()
    copy[:, keys] = 0
    return copy


def merge_states(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(out [..., dim], base-2 lse [...]) over all states' keys, in float32; empty states are neutral whatever out holds."""
    top = torch.stack(list(lses)).amax(0)
    top.masked_fill_(top == -math.inf, 0.0)
    weights = [torch.exp2(lse - top) for lse in lses]
    total = sum(weights[1:], start=weights[0])
    mixed = torch.zeros_like(outs[0], dtype=torch.float32)
    for out, weight in zip(outs, weights, strict=True):
        # 0 x NaN is NaN: where a state has no weight, its out must not be looked at.
        part = out.float() if bool((weight > 0).all()) else out.float().masked_fill_((weight == 0)[..., None], 0.0)
        mixed.addcmul_(part, weight[..., None])
    return mixed.div_(total.masked_fill(total == 0, 1.0)[..., None]), total.log2() + top
