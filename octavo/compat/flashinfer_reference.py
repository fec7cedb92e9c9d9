"""One sequence's attention in float32 PyTorch, under FlashInfer's names: what its tests compare with, if not Octavo.

FlashInfer's tests take single_prefill_with_kv_cache as their reference. Served by the kernel under test, it would share
that kernel's errors; this shares nothing with it.
"""

import math
from itertools import pairwise
from typing import Any

import torch

from octavo.compat.arguments import alibi_slopes, not_carried
from octavo.shapes import Tensor

MAX_LOGITS = 1 << 27
"""Elements of logits at a time."""


def single_prefill_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale_q: Tensor | None = None,
    scale_k: Tensor | None = None,
    scale_v: Tensor | None = None,
    o_dtype: torch.dtype | None = None,
    custom_mask: Tensor | None = None,
    packed_custom_mask: Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: Any = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
) -> Any:
    """out in q's dtype, lse float32 in base 2; arguments as FlashInfer has them."""
    if pos_encoding_mode == "ROPE_LLAMA":
        not_carried("pos_encoding_mode='ROPE_LLAMA'", "neither by its reference")
    if any(x is not None for x in (scale_q, scale_k, scale_v, kv_cache_sf)):
        not_carried("scale_q, scale_k, scale_v and kv_cache_sf", "neither by its reference")
    if kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    scale = (1.0 / math.sqrt(q.shape[-1]) if sm_scale is None else sm_scale) * (1.0 if k_scale is None else k_scale)
    slopes = alibi_slopes(q.shape[1], q.device) if pos_encoding_mode == "ALIBI" else None
    mask = _mask_of(custom_mask, packed_custom_mask, q.shape[0], k.shape[0])
    seen = _Seen(q.shape[0], k.shape[0], causal and mask is None, window_left, mask)
    step = max(1, MAX_LOGITS // max(1, q.shape[1] * k.shape[0]))
    parts = [
        _attend(q[a : a + step], k, v, torch.arange(a, min(a + step, q.shape[0]), device=q.device), scale, seen,
                logits_soft_cap or 0.0, slopes)
        for a in range(0, q.shape[0], step)
    ]  # fmt: skip
    out = torch.cat([x for x, _ in parts]) if parts else q.new_empty((0, q.shape[1], v.shape[-1]))
    lse = torch.cat([x for _, x in parts]) if parts else q.new_empty((0, q.shape[1]), dtype=torch.float32)
    out = (out if v_scale is None else out * v_scale).to(q.dtype if o_dtype is None else o_dtype)
    return (out, lse) if return_lse else out


def single_decode_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
) -> Any:
    """The same for one query [heads, dim]."""
    scale = (1.0 / math.sqrt(q.shape[-1]) if sm_scale is None else sm_scale) * (1.0 if q_scale is None else q_scale)
    options: dict[str, Any] = {"kv_layout": kv_layout, "pos_encoding_mode": pos_encoding_mode, "sm_scale": scale}
    options |= {"k_scale": k_scale, "v_scale": v_scale, "window_left": window_left, "logits_soft_cap": logits_soft_cap}
    out, lse = single_prefill_with_kv_cache(q[None], k, v, return_lse=True, **options)
    return (out[0], lse[0]) if return_lse else out[0]


def packbits(x: Tensor, bitorder: str = "big") -> Tensor:
    """Eight booleans to a byte, the first in its highest ("big") or lowest ("little") bit; the last ends in 0s."""
    bits = torch.nn.functional.pad(x.reshape(-1).to(torch.int32), (0, -x.numel() % 8)).view(-1, 8)
    shifts = torch.arange(8, device=x.device, dtype=torch.int32)
    return (bits << (shifts if bitorder == "little" else 7 - shifts)).sum(1).to(torch.uint8)


def segment_packbits(x: Tensor, indptr: Tensor, bitorder: str = "big") -> tuple[Tensor, Tensor]:
    """packbits of each segment x[indptr[i]:indptr[i + 1]], each beginning at a byte; and the bytes' offsets."""
    edges = indptr.tolist()
    parts = [packbits(x[a:b], bitorder) for a, b in pairwise(edges)]
    sizes = torch.tensor([0, *(len(part) for part in parts)], dtype=indptr.dtype, device=indptr.device)
    return torch.cat(parts) if parts else x.new_empty(0, dtype=torch.uint8), sizes.cumsum(0).to(indptr.dtype)


class _Seen:
    """Which keys a query sees."""

    def __init__(self, queries: int, keys: int, causal: bool, window_left: int, mask: Tensor | None) -> None:
        self.offset, self.keys = keys - queries, keys
        self.causal, self.window_left, self.mask = causal, window_left, mask

    def by(self, rows: Tensor) -> Tensor:
        """[rows, keys] bool."""
        position = rows[:, None] + self.offset
        key = torch.arange(self.keys, device=rows.device)[None]
        seen = torch.ones(len(rows), self.keys, dtype=torch.bool, device=rows.device)
        if self.mask is not None:
            seen &= self.mask[rows]
        if self.causal:
            seen &= key <= position
        if self.window_left >= 0:
            seen &= key >= position - self.window_left
        return seen


def _attend(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, scale: Any, seen: _Seen, soft_cap: float, slopes: Tensor | None
) -> tuple[Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    keys, values = (x.float().repeat_interleave(group, 1) for x in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    if slopes is not None:
        distance = torch.arange(k.shape[0], device=q.device)[None] - rows[:, None]
        logits = logits + slopes[:, None, None] * distance
    if soft_cap > 0:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    logits = logits.masked_fill(~seen.by(rows), -math.inf)
    lse = torch.logsumexp(logits, -1)
    weights = torch.exp(logits - torch.where(lse == -math.inf, 0.0, lse)[..., None])
    return torch.einsum("hqk,khd->qhd", weights, values), lse.T.contiguous() / math.log(2)


def _mask_of(custom: Tensor | None, packed: Tensor | None, queries: int, keys: int) -> Tensor | None:
    if packed is not None:
        bits = (packed[:, None] >> torch.arange(8, device=packed.device, dtype=torch.uint8)) & 1
        custom = bits.reshape(-1)[: queries * keys]
    return None if custom is None else custom.reshape(queries, keys).to(torch.bool)
