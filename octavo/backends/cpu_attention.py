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
from octavo.errors import fail
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
        fail("qo_indptr", f"at most {call.q.shape[0]} (rows of q) last", end, "pad q")
    tiles = _Tiles(call, sequences)
    for sequence in sequences:
        tiles.attend(sequence)
    tiles.write_empty(end, call.q.shape[0])


class _Tiles:
    """One call, tile by tile, in buffers that all tiles share. Keys and packed rows are [1, kv_heads, ..., dim]."""

    def __init__(self, call: AttentionCall, sequences: Sequence[SequencePages]) -> None:
        spec, heads = call.spec, (call.spec.num_kv_heads, call.spec.group_size)
        scale = call.sm_scale if call.scale_tensor is None else call.sm_scale * float(call.scale_tensor)
        # The sign goes into q: PyTorch's kernel may take a row's maximum before it scales.
        self.scale, self.negate = abs(scale), scale < 0
        self.causal, self.group, self.v_dim = spec.causal, spec.group_size, spec.v_dim
        self.q, self.out, self.lse = (x.unflatten(1, heads) for x in (call.q, call.out, call.lse))
        queried = [s for s in sequences if s.q_len]
        longest = max((s.q_len for s in queried), default=1)
        tokens = min(TILE_ROWS // self.group, TILE_TOKENS)
        self.tokens = max(1, min(tokens - tokens % KEY_MULTIPLE if tokens > KEY_MULTIPLE else tokens, longest))
        dim = max(spec.head_dim, spec.v_dim)
        keys = max((s.num_pages for s in queried), default=0) * spec.page_size
        self.k_pages, self.v_pages = (PageReader(x, keys, dim) for x in (call.k_cache, call.v_cache))
        shape = (1, spec.num_kv_heads, self.tokens * self.group, dim)
        self.packed = (torch.empty if dim == spec.head_dim else torch.zeros)(shape, dtype=spec.dtype)
        self.total, self.part = torch.empty(shape), torch.empty(shape)
        self.as_they_are = not self.negate and dim == spec.head_dim and self.q.stride(2) >= dim
        self.width = min(MASKED_KEYS, keys)
        self.mask = self._mask() if self.causal and self.tokens > 1 else None

    def _mask(self) -> Tensor:
        """[tokens x group, width + tokens + padding] of 0 and -inf: the mask of every tile is a slice of it."""
        columns = self.width + self.tokens + KEY_MULTIPLE - 1
        mask = torch.full((self.tokens, columns), -math.inf, dtype=self.q.dtype).triu_(self.width + 1)
        return mask[:, None].expand(self.tokens, self.group, columns).reshape(-1, columns)

    def attend(self, sequence: SequencePages) -> None:
        """All rows of one sequence."""
        keys = sequence.kv_len
        live = min(sequence.q_len, keys) if self.causal else sequence.q_len * bool(keys)
        first = sequence.start + sequence.q_len - live
        self.write_empty(sequence.start, first)
        if not live:
            return
        triangle = self.causal and live > 1
        readable = -(-keys // KEY_MULTIPLE) * KEY_MULTIPLE if triangle else keys
        k, v = self.k_pages.read(sequence, readable), self.v_pages.read(sequence, readable)
        readable = min(k.shape[2], v.shape[2])  # One may be read in place, which gives no key past the sequence's own.
        k, v = k[:, :, :readable], v[:, :, :readable]
        before = keys - live
        poisoned = _not_finite(k[:, :, before + 1 :], v[:, :, before + 1 :]) if triangle else []
        if not poisoned:
            self._rows(first, live, keys, k, v)
            return
        self._rows(first, live, keys, *(_zeroed(x, [before + i for i in poisoned]) for x in (k, v)))
        # Rows between two such keys see the same ones of them: no row meets one that it does not see.
        for low, high in pairwise([*poisoned, live]):
            keys = before + high
            self._rows(first + low, high - low, keys, k[:, :, :keys], v[:, :, :keys])

    def _rows(self, first: int, count: int, keys: int, k: Tensor, v: Tensor) -> None:
        """Rows [first, first + count); causal: the last of them sees `keys` keys. More in k and v are finite."""
        for low in range(0, count, self.tokens):
            high = min(low + self.tokens, count)
            self._tile(first + low, first + high, keys - count + high if self.causal else keys, k, v)

    def _tile(self, low: int, high: int, keys: int, k: Tensor, v: Tensor) -> None:
        """Rows [low, high); causal: the last of them sees `keys` keys."""
        tokens = high - low
        if tokens == 1 and self.as_they_are:
            out, lse = self._fused(self.q[low:high], k[:, :, :keys], v[:, :, :keys], None)
            self.out[low:high].copy_(out if self.v_dim == out.shape[-1] else out[..., : self.v_dim])
            torch.mul(lse, LOG2_E, out=self.lse[low:high])
            return
        q = self._pack(low, high)
        parts = self._parts(tokens, keys, k.shape[2])
        states = (self._fused(q, k[:, :, part], v[:, :, part], mask) for part, mask in parts)
        out, lse = next(states)
        merged = False
        for other, other_lse in states:
            if not merged:
                out, merged = self.total[:, :, : q.shape[2]].copy_(out), True
                lse.mul_(LOG2_E)
            fold_state(out, lse, other, other_lse.mul_(LOG2_E), self.part[:, :, : q.shape[2]])
        tokens_group = (tokens, self.group)
        self.out[low:high].copy_(out[0, ..., : self.v_dim].unflatten(1, tokens_group).transpose(0, 1))
        lse = lse[0].unflatten(1, tokens_group).transpose(0, 1)
        torch.mul(lse, 1.0 if merged else LOG2_E, out=self.lse[low:high])

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
            # Further keys that no row sees fill the last vector at no cost; below one, single keys are more exact.
            full = low + -(-(keys - low) // KEY_MULTIPLE) * KEY_MULTIPLE
            end = min(full, readable) if keys - low > KEY_MULTIPLE else keys
            yield slice(low, end), self.mask[: tokens * self.group, width - (before - low) : width + end - before]

    def _fused(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """(out [1, kv_heads, rows, dim], natural lse [1, kv_heads, rows])."""
        attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return attention(q, k, v, attn_mask=mask, scale=self.scale)

    def _pack(self, low: int, high: int) -> Tensor:
        """Rows [low, high) as [1, kv_heads, tokens x group, dim], zeros past head_dim."""
        packed = self.packed[:, :, : (high - low) * self.group]
        rows = packed[0, ..., : self.q.shape[-1]].unflatten(1, (high - low, self.group)).transpose(0, 1)
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
    finite = [x.isfinite().all(-1).flatten(0, 1).all(0) for x in (k, v)]
    return [1 + i for i in (~(finite[0] & finite[1])).nonzero().flatten().tolist()]


def _zeroed(x: Tensor, keys: list[int]) -> Tensor:
    copy = x.clone()
    copy[:, :, keys] = 0
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
