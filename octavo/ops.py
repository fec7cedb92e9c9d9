"""The operators as PyTorch sees them: schema, fake, implementation. torch.compile and CUDA graphs work through these.

`batch` is PagedBatch's five index tensors in field order; `shape` is (num_qo_heads, num_kv_heads, head_dim, value_dim,
page_size), `form` PlanForm's fields. Arguments are validated by the caller (api.py, append.py, merge.py).
"""

from collections.abc import Sequence

import torch
from torch.compiler import is_compiling

from octavo.backends import AttentionCall, arch_of, resolve
from octavo.kv_cache import PagedKV
from octavo.planning.form import PlanForm
from octavo.problem import AttentionSpec, PagedBatch
from octavo.shapes import LogSumExp, Output, Tensor
from octavo.validation import spec_of

_INPUTS = (
    "Tensor q, Tensor k_cache, Tensor v_cache, Tensor?[] batch, Tensor? plan, Tensor? scale_tensor, float sm_scale"
)
_OPTIONS = "bool causal=True, str backend='', int[] form=[]"
_SCHEMAS = (
    f"attention({_INPUTS}, *, {_OPTIONS}) -> (Tensor, Tensor)",
    f"attention_out({_INPUTS}, *, {_OPTIONS}, Tensor(a!) out, Tensor(b!) lse) -> ()",
    "plan(Tensor?[] batch, Tensor(a!) plan, int num_tokens, *, int[] shape, ScalarType dtype, "
    "bool causal, str backend, int[] form) -> ()",
    "append(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor?[] batch, str backend='') -> ()",
    "merge(Tensor[] outs, Tensor[] lses, str backend='') -> (Tensor, Tensor)",
)
_LIBRARY = torch.library.Library("octavo", "DEF")
for _schema in _SCHEMAS:
    _LIBRARY.define(_schema)


def pack_batch(batch: PagedBatch) -> list[Tensor | None]:
    """The op form of a batch."""
    return [batch.qo_indptr, batch.page_table, batch.kv_indptr, batch.last_page_len, batch.kv_lens]


def _unpack_batch(tensors: list[Tensor | None]) -> PagedBatch:
    qo_indptr, page_table, kv_indptr, last_page_len, kv_lens = tensors
    assert qo_indptr is not None and page_table is not None
    return PagedBatch(qo_indptr, page_table, kv_indptr, last_page_len, kv_lens)


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
    out: Tensor,
    lse: Tensor,
) -> None:
    spec = spec_of(q, PagedKV(k_cache, v_cache), causal)
    chosen = resolve(spec, arch_of(q.device), backend or None).backend
    paged, planned = _unpack_batch(batch), PlanForm(*form) if form else None
    chosen.attend(AttentionCall(spec, paged, q, k_cache, v_cache, out, lse, sm_scale, scale_tensor, plan, planned))


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
) -> tuple[Output, LogSumExp]:
    out, lse = empty_outputs(q, v_cache)
    inputs = (q, k_cache, v_cache, batch, plan, scale_tensor, sm_scale)
    _attention_out(*inputs, causal=causal, backend=backend, form=form, out=out, lse=lse)
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
) -> None:
    num_qo_heads, num_kv_heads, head_dim, value_dim, page_size = shape
    spec = AttentionSpec(num_qo_heads, num_kv_heads, head_dim, value_dim, page_size, causal, dtype)
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
