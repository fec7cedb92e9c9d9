"""Attention on the CPU: each sequence's pages read once, tiles of packed query rows through PyTorch's fused attention.

A tile holds consecutive tokens of one sequence, each with the query heads that share a K/V head, so K/V are read once
per K/V head and never repeated. All its rows see the keys before its first token: those take no mask. Its own tokens'
keys, and as many before them as a mask of fixed size has columns, take the causal triangle. The parts are merged in
order.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch

from octavo.backends.base import AttentionCall
from octavo.backends.cpu_pages import KEY_MULTIPLE, PageReader, SequencePages, sequences_of
from octavo.shapes import Tensor

TILE_ROWS = 704
"""Rows per K/V head in a tile: from 192 to 767 rows PyTorch's kernel takes 64 at a time, which feeds many threads."""
TILE_TOKENS = 256
"""Tokens in a tile at most: on average half as many keys are computed in vain."""
MASKED_KEYS = 1024
"""Keys before a tile up to which a mask costs less than one more merge."""
KEYS_AT_A_TIME = 2048
"""Keys per fused call without a mask: the kernel repacks them, in the second-level cache and in little memory."""
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
    """One call, tile by tile, in buffers that all tiles share."""

    def __init__(self, call: AttentionCall, sequences: Sequence[SequencePages]) -> None:
        spec, heads = call.spec, (call.spec.num_kv_heads, call.spec.group_size)
        scale = call.sm_scale if call.scale_tensor is None else call.sm_scale * float(call.scale_tensor)
        # The sign goes into q: PyTorch's kernel may take a row's maximum before it scales.
        self.scale, self.negate = abs(scale), scale < 0
        self.spec, self.causal, self.group = spec, spec.causal, spec.group_size
        self.q, self.out, self.lse = (x.unflatten(1, heads) for x in (call.q, call.out, call.lse))
        longest = max((s.q_len for s in sequences), default=1)
        tokens = min(TILE_ROWS // self.group, TILE_TOKENS)
        self.tokens = max(1, min(tokens - tokens % KEY_MULTIPLE if tokens > KEY_MULTIPLE else tokens, longest))
        dim = max(spec.head_dim, spec.v_dim)
        max_pages = max((len(s.page_ids) for s in sequences if s.q_len), default=0)
        self.k_pages, self.v_pages = (PageReader(x, max_pages, dim) for x in (call.k_cache, call.v_cache))
        shape = (spec.num_kv_heads, self.tokens * self.group, dim)
        self.packed = (torch.empty if dim == spec.head_dim else torch.zeros)(shape, dtype=spec.dtype)
        self.total, self.part = torch.empty(shape), torch.empty(shape)
        self.width = min(MASKED_KEYS, max((s.kv_len for s in sequences if s.q_len), default=0))
        self.mask = self._mask() if self.causal and self.tokens > 1 else None

    def _mask(self) -> Tensor:
        """[tokens x group, width + tokens + padding] of 0 and -inf: the mask of every tile is a slice of it."""
        columns = self.width + self.tokens + KEY_MULTIPLE - 1
        mask = torch.full((self.tokens, columns), -math.inf, dtype=self.spec.dtype).triu_(self.width + 1)
        return mask[:, None].expand(self.tokens, self.group, columns).reshape(-1, columns)

    def attend(self, sequence: SequencePages) -> None:
        """All rows of one sequence."""
        live = min(sequence.q_len, sequence.kv_len) if self.causal else sequence.q_len * bool(sequence.kv_len)
        first = sequence.start + sequence.q_len - live
        self.write_empty(sequence.start, first)
        if not live:
            return
        k = self.k_pages.read(sequence.page_ids, sequence.kv_len)
        v = self.v_pages.read(sequence.page_ids, sequence.kv_len)
        before = sequence.kv_len - live
        seen_later = slice(before + 1, sequence.kv_len)
        poisoned = _not_finite(k[:, seen_later], v[:, seen_later]) if self.causal and live > 1 else []
        if not poisoned:
            self._rows(first, live, sequence.kv_len, k, v)
            return
        clean = (_zeroed(x, [before + i for i in poisoned]) for x in (k, v))
        self._rows(first, live, sequence.kv_len, *clean)
        # Rows between two such keys see the same ones of them: no row meets one that it does not see.
        for low, high in pairwise([*poisoned, live]):
            keys = before + high
            self._rows(first + low, high - low, keys, k[:, :keys], v[:, :keys])

    def _rows(self, first: int, count: int, keys: int, k: Tensor, v: Tensor) -> None:
        """Rows [first, first + count); causal: the last of them sees `keys` keys. More in k and v are finite."""
        for low in range(0, count, self.tokens):
            high = min(low + self.tokens, count)
            self._tile(first + low, first + high, keys - count + high if self.causal else keys, k, v)

    def _tile(self, low: int, high: int, keys: int, k: Tensor, v: Tensor) -> None:
        """Rows [low, high); causal: the last of them sees `keys` keys."""
        q = self._pack(low, high)
        parts = self._parts(high - low, keys, k.shape[1])
        states = (self._fused(q, k[:, part], v[:, part], mask) for part, mask in parts)
        out, lse = next(states)
        for i, (other, other_lse) in enumerate(states):
            if i == 0:
                out = self.total[:, : q.shape[1]].copy_(out)
            fold_state(out, lse, other, other_lse, self.part[:, : q.shape[1]])
        tokens_group = (high - low, self.group)
        self.out[low:high].copy_(out[..., : self.spec.v_dim].unflatten(1, tokens_group).transpose(0, 1))
        self.lse[low:high].copy_(lse.unflatten(1, tokens_group).transpose(0, 1))

    def _parts(self, tokens: int, keys: int, readable: int) -> Iterator[tuple[slice, Tensor | None]]:
        """The fused calls of a tile: which keys, and the mask where rows do not all see them."""
        if tokens == 1:
            yield slice(0, keys), None
            return
        before, width = (keys - tokens, self.width) if self.causal else (keys, 0)
        low = 0
        while before - low > width:
            high = min(low + KEYS_AT_A_TIME, before)
            high -= high % KEY_MULTIPLE if self.causal else 0
            yield slice(low, high), None
            low = high
        if self.mask is not None:
            # The kernel takes keys past a multiple of 16 one by one: further keys, masked, are cheaper.
            end = min(-(-(keys - low) // KEY_MULTIPLE) * KEY_MULTIPLE + low, readable)
            yield slice(low, end), self.mask[: tokens * self.group, width - (before - low) : width + end - before]

    def _fused(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """(out [kv_heads, rows, dim], base-2 lse [kv_heads, rows])."""
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q[None], k[None], v[None], attn_mask=mask, scale=self.scale
        )
        return out[0], lse[0].mul_(LOG2_E)

    def _pack(self, low: int, high: int) -> Tensor:
        """Rows [low, high) as [kv_heads, tokens x group, dim], zeros past head_dim."""
        packed = self.packed[:, : (high - low) * self.group]
        rows = packed[..., : self.spec.head_dim].unflatten(1, (high - low, self.group)).transpose(0, 1)
        if self.negate:
            torch.neg(self.q[low:high], out=rows)
        else:
            rows.copy_(self.q[low:high])
        return packed

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


def fold_state(total: Tensor, lse: Tensor, out: Tensor, out_lse: Tensor, part: Tensor) -> None:
    """Merge the state (out, out_lse) into (total, lse), in place and in float32; an empty one changes nothing.

    Args:
        total, out, part: [..., dim]; total and part float32, part is overwritten.
        lse, out_lse: [...] float32, base 2.
    """
    empty = out_lse == -math.inf
    merged = torch.logaddexp2(lse, out_lse)
    weight = torch.exp2(out_lse - merged).masked_fill_(empty, 0.0)
    part.copy_(out)
    if bool(empty.any()):
        # 0 x NaN is NaN: what an empty state's out holds must not be looked at.
        part.masked_fill_(empty[..., None], 0.0)
    total.lerp_(part, weight[..., None])
    lse.copy_(merged)
