"""What every signature needs: a spec from a peer's arguments, refusals by name, and tensors that need no reading."""

import functools
import math
from typing import Any, NoReturn

import torch

from octavo.problem import AttentionSpec
from octavo.shapes import Tensor

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
MAX_HEAD_DIM = 256
WINDOWS = ("window_left", "window_right")


def not_carried(name: str, why: str) -> NoReturn:
    """An argument of a peer that Octavo has no equivalent of."""
    raise NotImplementedError(f"{name}: not carried by octavo; {why}")


def refuse(**given: object) -> None:
    """Raise for the first of these arguments that is set: not None, not False, not 0."""
    for name, value in given.items():
        if isinstance(value, Tensor) or value:
            not_carried(name, "leave it at its default")


def dtype_of(value: str | torch.dtype) -> torch.dtype:
    """A dtype from itself or its name ("float16")."""
    dtype = getattr(torch, value, None) if isinstance(value, str) else value
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype: expected a torch.dtype or its name, got {value!r}; fix: torch.float16")
    return dtype


def spec_for(
    heads: tuple[int, int],
    dims: tuple[int, int],
    page_size: int,
    causal: bool,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    **variants: Any,
) -> AttentionSpec:
    """The spec of a call.

    Args:
        heads: query heads, K/V heads.
        dims: of query and key heads, of value heads.
        dtype: of q; kv_dtype: of the cache, None for the same.
        variants: further fields of AttentionSpec; those at their defaults are left out.
    """
    for name, dim in zip(("head_dim", "head_dim_vo"), dims, strict=True):
        if dim > MAX_HEAD_DIM:
            not_carried(f"{name}={dim}", f"heads have at most {MAX_HEAD_DIM} elements")
    if dtype in FP8:
        not_carried("fp8 queries", "cast q to bfloat16 or float16; the cache may stay fp8")
    kv_dtype = None if kv_dtype == dtype else kv_dtype
    if kv_dtype is not None and kv_dtype not in FP8:
        not_carried(f"a {kv_dtype} cache under {dtype} queries", "keep both in one dtype, or the cache in fp8")
    used = {"kv_dtype": kv_dtype, **variants}
    used = {name: value for name, value in used.items() if (value != -1 if name in WINDOWS else value)}
    for name in used:
        if name not in AttentionSpec.__dataclass_fields__:
            not_carried(name, "this version of octavo has no such variant")
    return AttentionSpec(*heads, *dims, page_size, causal, dtype, **used)


def scale_of(default: float | Tensor, *factors: float | Tensor | None) -> float | Tensor:
    """The product of a scale and its factors; nothing is read from a device."""
    product = default
    for factor in factors:
        if isinstance(factor, Tensor):
            if factor.numel() != 1:
                not_carried(f"a scale of shape {list(factor.shape)}", "pass one scale per tensor")
            product = product * factor.reshape(()).float()
        elif factor is not None:
            product = product * float(factor)
    return product


def is_one(scale: float | Tensor | None) -> bool:
    return scale is None or (not isinstance(scale, Tensor) and float(scale) == 1.0)


def scale_values(out: Tensor, v_scale: float | Tensor | None) -> None:
    """out times the scale of the values, in place."""
    if v_scale is not None and not is_one(v_scale):
        out.mul_(v_scale)


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """x on the device; from the host through pinned memory, so that nothing waits."""
    if x.device == device:
        return x
    if x.device.type == "cpu" and device.type == "cuda":
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


def place(x: Tensor, buffer: Tensor | None, device: torch.device) -> Tensor:
    """x on the device, in `buffer`, whose address graphs have captured, where there is one."""
    if buffer is None:
        return to_device(x, device)
    if len(x) > len(buffer):
        raise ValueError(f"buffer: expected room for {len(x)} elements, got {len(buffer)}; fix: a larger buffer")
    buffer[: len(x)].copy_(to_device(x, buffer.device), non_blocking=True)
    return buffer


def steps(count: int, step: int, device: torch.device) -> Tensor:
    """[0, step, 2 step, ...], `count` of them, int32; written by the device."""
    return positions(count, device) * step


def positions(count: int, device: torch.device) -> Tensor:
    """[0, 1, 2, ...], `count` of them, int32; must not be written."""
    size = 1 << max(count, 1024).bit_length()
    # What a graph captures is written at its replay only: nothing to keep for others.
    make = _positions.__wrapped__ if _capturing(device) else _positions
    return make(size, device)[:count]


@functools.lru_cache(maxsize=64)
def _positions(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, dtype=torch.int32, device=device)


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def alibi_slopes(num_heads: int, device: torch.device) -> Tensor:
    """[num_heads] float32 of Press et al. 2022: 2^(-8 h / n), h = 1, 2, ..., for n heads, a power of two; other counts
    take those of the next lower power, then every other one of twice that power."""
    make = _alibi_slopes.__wrapped__ if _capturing(device) else _alibi_slopes
    return make(num_heads, device)


@functools.lru_cache(maxsize=64)
def _alibi_slopes(num_heads: int, device: torch.device) -> Tensor:
    lower = 1 << (num_heads.bit_length() - 1)
    head = torch.arange(num_heads, dtype=torch.float32, device=device)
    return torch.exp2(torch.where(head < lower, -8.0 * (head + 1), -4.0 * (2 * (head - lower) + 1)) / lower)


def default_scale(sm_scale: float | Tensor | None, head_dim: int) -> float | Tensor:
    return 1.0 / math.sqrt(head_dim) if sm_scale is None else sm_scale
