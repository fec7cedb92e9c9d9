"""FlashInfer's calls for one sequence of contiguous keys. LSE in base 2."""

import functools
from typing import Any

import torch

from octavo.compat.arguments import default_scale, refuse, scale_of, scale_values, spec_for, steps
from octavo.compat.flashinfer.masks import with_mask
from octavo.compat.flashinfer.tables import Position, check_backend, check_layout, ragged_batch, ragged_kv
from octavo.compat.one_call import attend_as
from octavo.shapes import Tensor


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
    sm_scale: float | Tensor | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: tuple[Tensor, Tensor] | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
) -> Any:
    """Attention of q [queries, qo_heads, dim] over k, v [keys, kv_heads, dim] (NHD) or [kv_heads, keys, dim] (HND).

    Returns:
        out [queries, qo_heads, value_dim], and with return_lse also lse [queries, qo_heads] float32.
    """
    refuse(scale_q=scale_q, scale_k=scale_k, scale_v=scale_v, kv_cache_sf=kv_cache_sf)
    refuse(o_dtype=None if o_dtype == q.dtype else o_dtype)
    check_backend(backend)
    position = Position.of(pos_encoding_mode)
    kv = ragged_kv(k, v, check_layout(kv_layout))
    masked = custom_mask is not None or packed_custom_mask is not None
    spec = spec_for(
        (q.shape[1], kv.num_kv_heads),
        (q.shape[2], kv.v_cache.shape[3]),
        1,
        causal and not masked,
        q.dtype,
        kv.k_cache.dtype,
        window_left=max(window_left, -1),
        logits_soft_cap=logits_soft_cap or 0.0,
        alibi=position.alibi,
        custom_mask=masked,
    )
    batch = ragged_batch(steps(2, q.shape[0], q.device), steps(2, kv.num_pages, q.device), kv.num_pages)
    out, lse = attend_as(
        spec,
        q,
        kv,
        with_mask(batch, custom_mask, packed_custom_mask),
        sm_scale=scale_of(default_scale(sm_scale, q.shape[2]), k_scale),
        alibi_slopes=position.slopes(spec, q.device),
    )
    scale_values(out, v_scale)
    return (out, lse) if return_lse else out


single_prefill_with_kv_cache_return_lse = functools.partial(single_prefill_with_kv_cache, return_lse=True)


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
    sm_scale: float | Tensor | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention of one query q [qo_heads, dim]; out [qo_heads, value_dim], lse [qo_heads]."""
    out, lse = single_prefill_with_kv_cache(
        q[None],
        k,
        v,
        causal=True,
        kv_layout=kv_layout,
        pos_encoding_mode=pos_encoding_mode,
        sm_scale=scale_of(default_scale(sm_scale, q.shape[-1]), q_scale),
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        return_lse=True,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    return (out[0], lse[0]) if return_lse else out[0]
