"""Tiles of packed query rows through PyTorch's fused attention on the CPU.

A tile holds consecutive tokens of one sequence, each with the query heads that share a K/V head, so K/V are read once
per K/V head and never repeated. All its rows see the keys before its first token: those take no mask. Its own tokens'
keys, and as many before them as a mask of fixed size has columns, take the causal triangle. The parts are merged in
order.
"""

import functools
import math
from collections.abc import Iterator

import torch

from octavo.backends.base import AttentionCall
from octavo.backends.cpu_pages import KEY_MULTIPLE
from octavo.shapes import Tensor

TILE_ROWS = 768
"""Rows per K/V head in a tile: from 768 rows PyTorch's kernel takes 256 at a time, below only 64."""
TILE_TOKENS = 256
"""Tokens in a tile at most: on average half as many keys are computed in vain."""
MASKED_KEYS = 1024
"""Keys before a tile up to which a mask costs less than one more merge."""
KEYS_AT_A_TIME = 2048
"""Keys per fused call without a mask: the kernel repacks them, in the second-level cache and in little memory."""
LOG2_E = math.log2(math.e)


Tile = tuple[int, int, int, Tensor, Tensor]
"""Rows [low, high), how many keys the last of them sees, K, V: see Tiles.attend."""


class _Scratch:
    """What one tile at a time needs beside its inputs and outputs: [1, kv_heads, rows, dim]."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, group: int, head_dim: int) -> None:
        self.packed = (torch.empty if shape[-1] == head_dim else torch.zeros)(shape, dtype=dtype)
        self.rows = self.packed[0, ..., :head_dim].unflatten(1, (-1, group)).transpose(0, 1)
        self._states: list[Tensor] = []

    def pack(self, q: Tensor, negate: bool) -> Tensor:
        """q [tokens, kv_heads, group, head_dim], or -q, as [1, kv_heads, tokens x group, dim], zeros past head_dim."""
        tokens = q.shape[0]
        if negate:
            torch.neg(q, out=self.rows[:tokens])
        else:
            self.rows[:tokens].copy_(q)
        return self.packed[:, :, : tokens * q.shape[2]]

    def states(self) -> list[Tensor]:
        """Two in float32, to merge in; few calls merge."""
        self._states = self._states or [torch.empty(self.packed.shape) for _ in range(2)]
        return self._states


class Tiles:
    """Tiles of one call, of which `at_once` threads may each compute one.

    Args:
        call: the call; its out and lse are written.
        most_rows: of any sequence.

    Attributes:
        tokens: in a tile at most.
        dim: of keys and values as `attend` takes them.
    """

    def __init__(self, call: AttentionCall, most_rows: int, at_once: int) -> None:
        spec, heads = call.spec, (call.spec.num_kv_heads, call.spec.group_size)
        scale = call.sm_scale if call.scale_tensor is None else call.sm_scale * float(call.scale_tensor)
        # The sign goes into q: PyTorch's kernel may take a row's maximum before it scales.
        self.scale, self.negate = abs(scale), scale < 0
        self.causal, self.group, self.v_dim = spec.causal, spec.group_size, spec.v_dim
        self.dim = max(spec.head_dim, spec.v_dim)
        self.q, self.out, self.lse = (x.unflatten(1, heads) for x in (call.q, call.out, call.lse))
        self.tokens = min(_most_tokens(self.group), most_rows)
        self.as_they_are = not self.negate and self.dim == spec.head_dim and self.q.stride(2) >= self.dim
        shape = (1, spec.num_kv_heads, self.tokens * self.group, self.dim)
        self.scratch = [_Scratch(shape, spec.dtype, self.group, spec.head_dim) for _ in range(at_once)]
        self.dtype = spec.dtype

    def attend(self, low: int, high: int, keys: int, k: Tensor, v: Tensor) -> None:
        """Rows [low, high), of one sequence; causal: the last of them sees `keys` keys. More in k and v are finite.

        k, v: [1, kv_heads, at least keys, dim].
        """
        tokens = high - low
        q, out, lse = self.q[low:high], self.out[low:high], self.lse[low:high]
        if tokens == 1 and self.as_they_are:
            state = self._fused(q, k[:, :, :keys], v[:, :, :keys], None)
            out.copy_(state[0] if self.v_dim == self.dim else state[0][..., : self.v_dim])
            torch.mul(state[1], LOG2_E, out=lse)
            return
        scratch = self.scratch.pop()
        state = self._merged(scratch, scratch.pack(q, self.negate), tokens, keys, k, v)
        out.copy_(self._unpacked(state[0], tokens)[..., : self.v_dim])
        lse.copy_(self._unpacked(state[1], tokens))
        self.scratch.append(scratch)

    def _unpacked(self, x: Tensor, tokens: int) -> Tensor:
        """[1, kv_heads, tokens x group, ...] as [tokens, kv_heads, group, ...]."""
        return x.view(x.shape[1], tokens, self.group, *x.shape[3:]).transpose(0, 1)

    def _merged(
        self, scratch: _Scratch, q: Tensor, tokens: int, keys: int, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(out [1, kv_heads, rows, dim], lse [1, kv_heads, rows] in base 2) of packed rows."""
        parts = self._parts(tokens, keys, min(k.shape[2], v.shape[2]))
        states = (self._fused(q, k[:, :, part], v[:, :, part], mask) for part, mask in parts)
        out, lse = next(states)
        total = None
        lse.mul_(LOG2_E)
        for other, other_lse in states:
            if total is None:
                total, part = (x[:, :, : q.shape[2]] for x in scratch.states())
                out = total.copy_(out)
            fold_state(total, lse, other, other_lse.mul_(LOG2_E), part)
        return out, lse

    def _parts(self, tokens: int, keys: int, readable: int) -> Iterator[tuple[slice, Tensor | None]]:
        """The fused calls of a tile: which keys, and the mask where rows do not all see them."""
        if tokens == 1:
            yield slice(0, keys), None
            return
        before, width = (keys - tokens, MASKED_KEYS) if self.causal else (keys, 0)
        low = 0
        while before - low > width:
            high = min(low + KEYS_AT_A_TIME, before)
            high -= high % KEY_MULTIPLE if self.causal else 0
            yield slice(low, high), None
            low = high
        if self.causal:
            # Further keys that no row sees fill the last vector at no cost; below one, single keys are more exact.
            full = low + -(-(keys - low) // KEY_MULTIPLE) * KEY_MULTIPLE
            end = min(full, readable) if keys - low > KEY_MULTIPLE else keys
            mask = _mask(_most_tokens(self.group), self.group, self.dtype)
            yield slice(low, end), mask[: tokens * self.group, width - (before - low) : width + end - before]

    def _fused(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """(out [1, kv_heads, rows, dim], natural lse [1, kv_heads, rows])."""
        attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return attention(q, k, v, attn_mask=mask, scale=self.scale)

    def write_empty(self, low: int, high: int) -> None:
        """Rows [low, high) see no key."""
        if low < high:
            self.out[low:high].zero_()
            self.lse[low:high].fill_(-math.inf)


def _most_tokens(group: int) -> int:
    tokens = min(TILE_ROWS // group, TILE_TOKENS)
    return max(1, tokens - tokens % KEY_MULTIPLE if tokens > KEY_MULTIPLE else tokens)


@functools.lru_cache(maxsize=4)
def _mask(tokens: int, group: int, dtype: torch.dtype) -> Tensor:
    """[tokens x group, MASKED_KEYS + tokens + padding] of 0 and -inf: the mask of every tile is a slice of it."""
    mask = torch.zeros(tokens, group, MASKED_KEYS + tokens + KEY_MULTIPLE - 1, dtype=dtype, device="cpu")
    mask[:, 0, MASKED_KEYS:].fill_(-math.inf).triu_(1)
    mask[:, 1:, MASKED_KEYS:] = mask[:, :1, MASKED_KEYS:]
    return mask.flatten(0, 1)


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
