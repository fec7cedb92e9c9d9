"""What a call's variants bring to the portable kernels: which forms of them, the key of these, and the arguments."""

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from octavo.backends.base import AttentionCall
from octavo.backends.launch import alignment
from octavo.shapes import Tensor

NUMBER, ONE_SCALE, HEAD_SCALES = 1, 2, 3
BYTE_MASK, PACKED_MASK = 1, 2
LONG = 1 << 31


class Kinds(NamedTuple):
    """Forms of what calls may bring in several; constants of the kernel."""

    k_scale: int = 0
    """0: none, or a number, which sm_scale takes in; ONE_SCALE, HEAD_SCALES: a tensor."""
    v_scale: int = 0
    """0: none; NUMBER; else as k_scale."""
    mask: int = 0
    """0: none."""


NO_KINDS = Kinds()


class VariantArguments(NamedTuple):
    """Of one call of a spec that is not plain."""

    kinds: Kinds
    key: Hashable
    q: Tensor
    sm_scale: float
    extras: tuple[Any, ...]
    """(sinks, ALiBi slopes, k_scale, v_scale, mask, mask_indptr)."""
    mask_length: int | None


def variant_arguments(call: AttentionCall) -> VariantArguments:
    """The scale is not negative where it is a number."""
    values, batch, q, sm_scale = call.extras, call.batch, call.q, call.sm_scale
    sinks = slopes = k_scale = v_scale = None
    if values is not None:
        sinks, slopes, k_scale, v_scale = values
    if k_scale is not None and not isinstance(k_scale, Tensor):
        sm_scale, k_scale = sm_scale * float(k_scale), None
        if sm_scale < 0 and call.scale_tensor is None:
            q, sm_scale = -q, -sm_scale
    v_kind = NUMBER if isinstance(v_scale, (int, float)) else _scale_kind(v_scale)
    mask, offsets = (batch.custom_mask, batch.mask_indptr) if call.spec.custom_mask else (None, None)
    packed = mask is not None and mask.dtype == torch.uint8
    kinds = Kinds(_scale_kind(k_scale), v_kind, 0 if mask is None else PACKED_MASK if packed else BYTE_MASK)
    if mask is not None and not packed:
        mask = mask.view(torch.uint8)
    length = None if mask is None else mask.shape[0]
    numbers = float(v_scale) if v_kind == NUMBER and v_scale is not None else v_scale
    extras = (_dense(sinks), _dense(slopes), _dense(k_scale), _dense(numbers), mask, offsets)
    tensors = [x for x in extras if isinstance(x, Tensor)]
    key = (
        kinds,
        tuple(x is None for x in extras),
        None if offsets is None else offsets.dtype,
        alignment(q, *tensors),
        length is not None and length >= LONG,
    )
    return VariantArguments(kinds, key, q, sm_scale, extras, length)


def _scale_kind(scale: object) -> int:
    if not isinstance(scale, Tensor):
        return 0
    return ONE_SCALE if scale.numel() == 1 or scale.stride(0) == 0 else HEAD_SCALES


def _dense(x: Any) -> Any:
    """Kernels read elements next to each other, or the first alone."""
    if isinstance(x, Tensor) and x.dim() and x.stride(0) > 1:
        return x.contiguous()
    return x
