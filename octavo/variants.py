"""The variants of one call: which belong to the spec, which are values, and how both are checked."""

import math
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import torch

from octavo.errors import fail
from octavo.problem import AttentionSpec, PagedBatch
from octavo.shapes import Tensor

SPEC_FIELDS = ("window_left", "window_right", "logits_soft_cap")
VALUES = ("sinks", "alibi_slopes", "k_scale", "v_scale")
LN_2 = math.log(2)


class Extras(NamedTuple):
    """Values of one call's variants; those that the spec leaves out are None."""

    sinks: Tensor | None = None
    """[Hq] float32: natural logits."""
    alibi_slopes: Tensor | None = None
    """[Hq] float32."""
    k_scale: Tensor | float | None = None
    """Multiplied with k: a number, or [Hkv] float32."""
    v_scale: Tensor | float | None = None

    def to(self, device: torch.device | str) -> "Extras":
        """The same with all tensors on `device`."""
        moved: list[Any] = [x.to(device) if isinstance(x, Tensor) else x for x in self]
        return Extras(*moved)


def spec_fields(variants: Mapping[str, Any], batch: PagedBatch) -> dict[str, Any]:
    """Fields of AttentionSpec that a call's keyword arguments and its batch imply. TypeError for unknown ones."""
    for name in variants:
        if name not in SPEC_FIELDS and name not in VALUES:
            fail(name, f"no such argument, or one of {SPEC_FIELDS + VALUES}", "it", "see octavo.run", TypeError)
    found = {name: variants[name] for name in SPEC_FIELDS if name in variants}
    found["sinks"] = variants.get("sinks") is not None
    found["alibi"] = variants.get("alibi_slopes") is not None
    found["custom_mask"] = batch.custom_mask is not None
    return found


def check_extras(spec: AttentionSpec, values: Mapping[str, Any], device: torch.device) -> Extras | None:
    """The values of one call's variants, or None where the spec is plain. Nothing is read from a GPU."""
    for name in values:
        if name not in VALUES and name not in SPEC_FIELDS:
            fail(name, f"no such argument, or one of {VALUES}", "it", "see BatchAttention.run", TypeError)
    sinks, slopes = values.get("sinks"), values.get("alibi_slopes")
    _check_per_head("sinks", sinks, spec.sinks, "sinks", spec, device)
    _check_per_head("alibi_slopes", slopes, spec.alibi, "alibi", spec, device)
    scales = [_check_kv_scale(name, values.get(name), spec, device) for name in ("k_scale", "v_scale")]
    return None if spec.is_plain else Extras(sinks, slopes, *scales)


def _check_per_head(name: str, x: Any, wanted: bool, field: str, spec: AttentionSpec, device: torch.device) -> None:
    if (x is not None) != wanted:
        expected = (
            f"a tensor [{spec.num_qo_heads}] as the spec has {field}" if wanted else f"None as the spec has no {field}"
        )
        got = "None" if x is None else type(x).__name__
        fail(name, expected, got, f"AttentionSpec(..., {field}=True) goes with run(..., {name}=tensor)")
    if x is None:
        return
    if not isinstance(x, Tensor):
        fail(name, "a tensor", type(x).__name__, "one float32 number per query head", TypeError)
    if x.dtype != torch.float32:
        fail(name, "dtype torch.float32", x.dtype, f"{name}.float()", TypeError)
    if tuple(x.shape) != (spec.num_qo_heads,) or not x.is_contiguous():
        fail(name, f"shape [{spec.num_qo_heads}], contiguous", f"{list(x.shape)}", "one number per query head")
    if x.device != device:
        fail(name, f"on {device} like q", x.device, f"{name}.to({str(device)!r})")


def _check_kv_scale(name: str, x: Any, spec: AttentionSpec, device: torch.device) -> Tensor | float | None:
    """A number or a float32 tensor [Hkv]."""
    if x is None:
        return None
    if spec.kv_dtype is None:
        fix = "put k's scale into sm_scale and multiply out by v's"
        fail(name, f"None where the cache has q's dtype {spec.dtype}", type(x).__name__, fix)
    heads = spec.num_kv_heads
    if isinstance(x, Tensor):
        if not x.is_floating_point() or tuple(x.shape) not in ((), (1,), (heads,)):
            got = f"{list(x.shape)} {x.dtype}"
            fail(name, f"a float, or a float32 tensor of shape [] or [{heads}]", got, "one scale, or one per K/V head")
        if x.device != device and x.numel() == 1 and x.device.type == "cpu":
            x = x.item()
        elif x.device != device:
            fail(name, f"on {device} like q", x.device, f"{name}.to({str(device)!r})")
        else:
            return x.to(torch.float32).reshape(-1).expand(heads).contiguous()
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        fail(name, "a float or a tensor", type(x).__name__, "one scale, or one per K/V head", TypeError)
    if not math.isfinite(x):
        fail(name, "a finite number", x, "the scale that k or v was divided by when it was cast")
    return float(x)


def look_of_variants(variants: Mapping[str, Any], batch: PagedBatch) -> Hashable:
    """What a launch depends on: fields of the spec, and of values their kind alone. None for a plain call."""
    mask, indptr = batch.custom_mask, batch.mask_indptr
    if not variants and mask is None:
        return None
    kinds = [(name, x if name in SPEC_FIELDS else _kind_of(x)) for name, x in variants.items()]
    return (*kinds, mask is not None and _kind_of(mask), indptr is not None and _kind_of(indptr))


def _kind_of(x: Any) -> Hashable:
    if isinstance(x, Tensor):
        # A mask grows with every step.
        return x.dtype, x.dim(), x.device, x.data_ptr() & 15
    return type(x).__name__


def check_base(lse_base: int | str) -> None:
    if lse_base not in (2, "e"):
        fail("lse_base", '2 or "e"', repr(lse_base), 'lse is log2(sum(exp(s))), with "e" the natural logarithm')


def in_base(lse: Tensor, lse_base: int | str) -> Tensor:
    """A base-2 lse in the base asked for: in place, no second buffer."""
    return lse if lse_base == 2 else lse.mul_(LN_2)


def check_mask(spec: AttentionSpec, batch: PagedBatch) -> None:
    """Whether each sequence's mask lies inside custom_mask. Synchronises on a GPU."""
    mask, indptr = batch.custom_mask, batch.with_mask_indptr(spec.page_size).mask_indptr
    if mask is None or indptr is None or not batch.num_sequences:
        return
    ends = indptr[:-1].long() + batch.mask_sizes(spec.page_size)
    if int(indptr[:-1].min()) < 0 or int(ends.max()) > mask.shape[0]:
        got = f"masks from {int(indptr[:-1].min())} to {int(ends.max())} in {mask.shape[0]}"
        unit = "bytes, each sequence from a new one" if mask.dtype == torch.uint8 else "elements"
        fail("custom_mask", f"q_len x kv_len of each sequence, in {unit}", got, "see PagedBatch.with_mask")
