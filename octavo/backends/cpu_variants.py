"""Attention variants on the CPU: float32 matrix products over blocks of keys, with a running softmax.

A tile holds consecutive tokens of one sequence. Only the keys that some row of it may see are gathered, a block at a
time: memory does not grow with the sequence, nor work with keys outside the windows.
"""

import math
from typing import NamedTuple

import torch

from octavo.backends.base import AttentionCall, Extras
from octavo.backends.cpu_pages import SequencePages, sequences_of
from octavo.errors import fail
from octavo.problem import AttentionSpec
from octavo.shapes import Tensor

BLOCK_KEYS = 512
SCORES = 1 << 21
"""Scores in memory at a time, of all heads; what is as large besides is a mask of bytes."""
LOG2_E = math.log2(math.e)


class _State(NamedTuple):
    """Running softmax of a tile: [kv_heads, tokens, group], and acc with value_dim as a last dimension; float32."""

    top: Tensor
    total: Tensor
    acc: Tensor


def attend(call: AttentionCall) -> None:
    """Write call.out and call.lse completely."""
    call = call._replace(batch=call.batch.with_mask_indptr(call.spec.page_size))
    variants = _Variants(call)
    sequences = sequences_of(call.batch, call.spec.page_size)
    end = sequences[-1].start + sequences[-1].q_len if sequences else 0
    if end > call.q.shape[0]:
        fail("qo_indptr", f"at most {call.q.shape[0]} (rows of q) last", end, "pad q")
    for i, s in enumerate(sequences):
        mask = _Mask(call, i, s) if call.spec.custom_mask else None
        for low in range(0, s.q_len, variants.tokens):
            variants.attend(s, low, min(low + variants.tokens, s.q_len), mask)
    variants.write_empty(end, call.q.shape[0])


def key_range(spec: AttentionSpec, position: int, kv_len: int) -> tuple[int, int]:
    """Keys [low, high) that windows and causality let a row at this position see; never less than those of a mask."""
    low, high = 0, kv_len
    if spec.window_left >= 0:
        low = max(0, position - spec.window_left)
    if spec.window_right >= 0:
        high = position + spec.window_right + 1
    elif spec.causal and not spec.custom_mask:
        high = position + 1
    return low, min(high, kv_len)


class _Variants:
    """Tiles of one call."""

    def __init__(self, call: AttentionCall) -> None:
        spec, heads = call.spec, (call.spec.num_kv_heads, call.spec.group_size)
        extras = call.extras or Extras()
        scale = call.sm_scale if call.scale_tensor is None else call.sm_scale * float(call.scale_tensor)
        self.spec, self.caches = spec, (call.k_cache, call.v_cache)
        self.scale = scale * _per_head(extras.k_scale)
        self.v_scale = _per_head(extras.v_scale)
        self.sinks = None if extras.sinks is None else extras.sinks.float().view(heads[0], 1, heads[1])
        slopes = extras.alibi_slopes
        self.slopes = None if slopes is None else slopes.float().view(heads[0], 1, heads[1], 1)
        self.q, self.out, self.lse = (x.unflatten(1, heads) for x in (call.q, call.out, call.lse))
        self.tokens = max(1, SCORES // (spec.num_qo_heads * BLOCK_KEYS))

    def attend(self, sequence: SequencePages, low: int, high: int, mask: "_Mask | None") -> None:
        """Tokens [low, high) of a sequence."""
        rows = slice(sequence.start + low, sequence.start + high)
        q = self.q[rows].transpose(0, 1).float() * self.scale
        state = _State(
            torch.full(q.shape[:3], -math.inf), torch.zeros(q.shape[:3]), torch.zeros(*q.shape[:3], self.spec.v_dim)
        )
        offset = sequence.kv_len - sequence.q_len
        positions = torch.arange(low, high)[:, None] + offset
        first = key_range(self.spec, low + offset, sequence.kv_len)
        last = key_range(self.spec, high - 1 + offset, sequence.kv_len)
        for begin in range(first[0], last[1], BLOCK_KEYS):
            end = min(begin + BLOCK_KEYS, last[1])
            seen = None
            if begin < last[0] or end > first[1] or mask is not None:
                seen = self._seen(positions, begin, end, None if mask is None else mask.block(low, high, begin, end))
                if not bool(seen.any()):
                    continue
            k, v = (_gather(x, sequence, begin, end) for x in self.caches)
            state = self._fold(state, self._logits(q, k, positions, begin, seen), v)
        self._write(rows, state)

    def _seen(self, positions: Tensor, begin: int, end: int, mask: Tensor | None) -> Tensor:
        """[tokens, keys] bool: which of the keys [begin, end) each token sees."""
        spec, keys = self.spec, torch.arange(begin, end)
        seen = torch.ones(len(positions), end - begin, dtype=torch.bool) if mask is None else mask
        if spec.window_left >= 0:
            seen = seen & (keys >= positions - spec.window_left)
        if spec.window_right >= 0:
            seen = seen & (keys <= positions + spec.window_right)
        elif spec.causal and not spec.custom_mask:
            seen = seen & (keys <= positions)
        return seen

    def _logits(self, q: Tensor, k: Tensor, positions: Tensor, begin: int, seen: Tensor | None) -> Tensor:
        """[kv_heads, tokens, group, keys] natural logits, -inf where a key is not seen."""
        logits = (q.flatten(1, 2) @ k.transpose(1, 2)).view(*q.shape[:3], k.shape[1])
        if self.slopes is not None:
            distance = torch.arange(begin, begin + k.shape[1]) - positions
            logits.add_(self.slopes * distance[None, :, None].float())
        if self.spec.logits_soft_cap:
            logits.div_(self.spec.logits_soft_cap).tanh_().mul_(self.spec.logits_soft_cap)
        return logits if seen is None else logits.masked_fill_(~seen[None, :, None], -math.inf)

    def _fold(self, state: _State, logits: Tensor, v: Tensor) -> _State:
        top = torch.maximum(state.top, logits.amax(-1))
        base = top.masked_fill(top == -math.inf, 0.0)
        weights = logits.sub_(base[..., None]).exp_()
        kept = torch.exp(state.top - base)
        total = state.total * kept + weights.sum(-1)
        acc = (weights.flatten(1, 2) @ v).view(state.acc.shape)
        return _State(top, total, acc.addcmul_(state.acc, kept[..., None]))

    def _write(self, rows: slice, state: _State) -> None:
        lse = state.top + state.total.log()
        total = lse if self.sinks is None else torch.logaddexp(lse, self.sinks.expand_as(lse))
        empty = state.total == 0
        weight = torch.exp(lse - total) / state.total
        out = state.acc * weight.masked_fill(empty, 0.0)[..., None] * self.v_scale
        self.out[rows].copy_(out.transpose(0, 1))
        self.lse[rows].copy_((total * LOG2_E).transpose(0, 1))

    def write_empty(self, low: int, high: int) -> None:
        """Rows [low, high) see no key."""
        self.out[low:high].zero_()
        self.lse[low:high] = -math.inf if self.sinks is None else self.sinks[:, 0] * LOG2_E


class _Mask:
    """The custom mask of one sequence."""

    def __init__(self, call: AttentionCall, index: int, sequence: SequencePages) -> None:
        mask, indptr = call.batch.custom_mask, call.batch.mask_indptr
        if mask is None or indptr is None:
            fail("batch", "a mask, as the spec has custom_mask", None, "batch.with_mask(custom_mask)")
        self._keys, self._packed = sequence.kv_len, mask.dtype == torch.uint8
        count = sequence.q_len * sequence.kv_len
        start, length = int(indptr[index]), -(-count // 8) if self._packed else count
        if start < 0 or start + length > mask.shape[0]:
            got = f"{length} from {start} of {mask.shape[0]}"
            fail("custom_mask", f"q_len x kv_len elements of sequence {index}", got, "see PagedBatch.with_mask")
        self._mask = mask[start : start + length]

    def block(self, low: int, high: int, begin: int, end: int) -> Tensor:
        """[high - low, end - begin] bool."""
        if not self._packed:
            return self._mask.view(-1, self._keys)[low:high, begin:end]
        element = torch.arange(low, high)[:, None] * self._keys + torch.arange(begin, end)
        return (self._mask[element >> 3] >> (element & 7).to(torch.uint8) & 1).bool()


def _per_head(scale: Tensor | float | None) -> Tensor | float:
    """A scale to multiply with [kv_heads, tokens, group, dim]."""
    if isinstance(scale, Tensor):
        return scale.float().view(-1, 1, 1, 1)
    return 1.0 if scale is None else scale


def _gather(cache: Tensor, sequence: SequencePages, begin: int, end: int) -> Tensor:
    """Keys or values [begin, end) of a sequence: [kv_heads, keys, dim] float32. IndexError for a page outside."""
    page_size = cache.shape[1]
    first = begin // page_size
    ids = sequence.page_ids[first : -(-end // page_size)]
    stored = cache.view(torch.uint8) if cache.element_size() == 1 else cache
    keys = stored.index_select(0, ids).flatten(0, 1)[begin - first * page_size : end - first * page_size]
    return keys.view(cache.dtype).transpose(0, 1).float()
