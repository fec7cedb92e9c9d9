"""The operators as PyTorch sees them: schema, fake, implementation. torch.compile and CUDA graphs work through these.

`batch` is PagedBatch's tensors in field order, the mask's two only where there is one; `shape` is (num_qo_heads,
num_kv_heads, head_dim, value_dim, page_size), `form` PlanForm's fields, `window` (window_left, window_right), empty
where there is none. Arguments are validated by the caller (api.py, append.py, merge.py).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.compiler import is_compiling

from octavo.backends import AttentionCall, arch_of, resolve
from octavo.kv_cache import PagedKV
from octavo.planning.form import PlanForm
from octavo.problem import AttentionSpec, PagedBatch
from octavo.shapes import LogSumExp, Output, Tensor
from octavo.validation import spec_of
from octavo.variants import Extras

INDEX_TENSORS = 5
"""Of a batch without a mask."""

_INPUTS = (
    "Tensor q, Tensor k_cache, Tensor v_cache, Tensor?[] batch, Tensor? plan, Tensor? scale_tensor, float sm_scale"
)
_OPTIONS = (
    "bool causal=True, str backend='', int[] form=[], int[] window=[], float logits_soft_cap=0.0, "
    "Tensor? sinks=None, Tensor? alibi_slopes=None, Tensor? k_scale=None, Tensor? v_scale=None"
)
_SCHEMAS = (
    f"attention({_INPUTS}, *, {_OPTIONS}) -> (Tensor, Tensor)",
    f"attention_out({_INPUTS}, *, {_OPTIONS}, Tensor(a!) out, Tensor(b!) lse) -> ()",
    "plan(Tensor?[] batch, Tensor(a!) plan, int num_tokens, *, int[] shape, ScalarType dtype, "
    "bool causal, str backend, int[] form, int[] window=[], ScalarType? kv_dtype=None) -> ()",
    "append(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor?[] batch, str backend='') -> ()",
    "merge(Tensor[] outs, Tensor[] lses, str backend='') -> (Tensor, Tensor)",
)
_LIBRARY = torch.library.Library("octavo", "DEF")
for _schema in _SCHEMAS:
    _LIBRARY.define(_schema)


def pack_batch(batch: PagedBatch) -> list[Tensor | None]:
    """The op form of a batch."""
    index = batch.fields()
    return [*index] if batch.custom_mask is None else [*index, batch.custom_mask, batch.mask_indptr]


def variant_options(spec: AttentionSpec, extras: Extras | None, q: Tensor) -> dict[str, Any]:
    """The options of an attention operator that say a spec's variants, numbers as tensors; none for a plain one."""
    if spec.is_plain or extras is None:
        return {}
    options: dict[str, Any] = {"window": [spec.window_left, spec.window_right]}
    options["logits_soft_cap"] = float(spec.logits_soft_cap)
    for name, x in zip(Extras._fields, extras, strict=True):
        options[name] = q.new_full((spec.num_kv_heads,), x, dtype=torch.float32) if isinstance(x, float) else x
    return options


def _unpack_batch(tensors: list[Tensor | None]) -> PagedBatch:
    qo_indptr, page_table, *others = tensors
    assert qo_indptr is not None and page_table is not None
    return PagedBatch(qo_indptr, page_table, *others)


def _window_fields(window: Sequence[int]) -> dict[str, int]:
    return dict(zip(("window_left", "window_right"), window, strict=False))


def empty_outputs(q: Tensor, v_cache: Tensor) -> tuple[Output, LogSumExp]:
    out = q.new_empty((q.shape[0], q.shape[1], v_cache.shape[3]))
    return out, q.new_empty((q.shape[0], q.shape[1]), dtype=torch.float32)


def _attention_out(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: list[Tensor | None],
    plan: Tensor | None,
    scale_tensor: Tensor | None,
    sm_scale: float,
    *,
    causal: bool = True,
    backend: str = "",
    form: Sequence[int] = (),
    window: Sequence[int] = (),
    logits_soft_cap: float = 0.0,
    out: Tensor,
    lse: Tensor,
    **extras: Tensor | None,
) -> None:
    values = Extras(**extras)
    variants: dict[str, Any] = {**_window_fields(window), "logits_soft_cap": logits_soft_cap}
    variants |= {"sinks": values.sinks is not None, "alibi": values.alibi_slopes is not None}
    variants |= {"custom_mask": len(batch) > INDEX_TENSORS}
    spec = spec_of(q, PagedKV(k_cache, v_cache), causal, **variants)
    chosen = resolve(spec, arch_of(q.device), backend or None).backend
    paged, planned = _unpack_batch(batch), PlanForm(*form) if form else None
    tensors, scale = (q, k_cache, v_cache, out, lse), (sm_scale, scale_tensor)
    chosen.attend(AttentionCall(spec, paged, *tensors, *scale, plan, planned, None if spec.is_plain else values))


def _attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: list[Tensor | None],
    plan: Tensor | None,
    scale_tensor: Tensor | None,
    sm_scale: float,
    *,
    causal: bool = True,
    backend: str = "",
    form: Sequence[int] = (),
    **variants: Any,
) -> tuple[Output, LogSumExp]:
    out, lse = empty_outputs(q, v_cache)
    inputs = (q, k_cache, v_cache, batch, plan, scale_tensor, sm_scale)
    _attention_out(*inputs, causal=causal, backend=backend, form=form, **variants, out=out, lse=lse)
    return out, lse


def _plan(
    batch: list[Tensor | None],
    plan: Tensor,
    num_tokens: int,
    *,
    shape: list[int],
    dtype: torch.dtype,
    causal: bool,
    backend: str,
    form: Sequence[int],
    window: Sequence[int] = (),
    kv_dtype: torch.dtype | None = None,
) -> None:
    num_qo_heads, num_kv_heads, head_dim, value_dim, page_size = shape
    variants: dict[str, Any] = {**_window_fields(window), "custom_mask": len(batch) > INDEX_TENSORS}
    variants["kv_dtype"] = kv_dtype
    spec = AttentionSpec(num_qo_heads, num_kv_heads, head_dim, value_dim, page_size, causal, dtype, **variants)
    chosen = resolve(spec, arch_of(plan.device), backend or None).backend
    chosen.plan(spec, _unpack_batch(batch), num_tokens, PlanForm(*form), plan)


def _append(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, batch: list[Tensor | None], backend: str = ""
) -> None:
    chosen = resolve(None, arch_of(k_cache.device), backend or None).backend
    chosen.append(k, v, k_cache, v_cache, _unpack_batch(batch))


def _merge(outs: list[Tensor], lses: list[Tensor], backend: str = "") -> tuple[Output, LogSumExp]:
    out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
    resolve(None, arch_of(out.device), backend or None).backend.merge(outs, lses, out, lse)
    return out, lse


_IMPLEMENTATIONS = {
    "attention": _attention,
    "attention_out": _attention_out,
    "plan": _plan,
    "append": _append,
    "merge": _merge,
}
for _name, _function in _IMPLEMENTATIONS.items():
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")


@torch.library.register_fake("octavo::attention", lib=_LIBRARY)
def _attention_fake(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *unused: object, **options: object
) -> tuple[Output, LogSumExp]:
    return empty_outputs(q, v_cache)


@torch.library.register_fake("octavo::merge", lib=_LIBRARY)
def _merge_fake(outs: list[Tensor], lses: list[Tensor], backend: str = "") -> tuple[Output, LogSumExp]:
    return torch.empty_like(outs[0]), torch.empty_like(lses[0])


def _writes_only(*inputs: object, **options: object) -> None:
    return None


for _name in ("attention_out", "plan", "append"):
    torch.library.register_fake(f"octavo::{_name}", _writes_only, lib=_LIBRARY)


def is_traced(x: object) -> bool:
    """Whether PyTorch must see an operator: under torch.compile or export, or for tensor subclasses (fakes, modes)."""
    return type(x) is not Tensor or is_compiling()


attention = torch.ops.octavo.attention.default
attention_out = torch.ops.octavo.attention_out.default
plan = torch.ops.octavo.plan.default
append = torch.ops.octavo.append.default
merge = torch.ops.octavo.merge.default
