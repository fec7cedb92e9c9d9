"""How a call looks: all that checks and the choice of launches can see of it, cheap to read and to compare.

What follows from it is worked out once: a call that looks like an earlier one is neither checked nor dispatched again.
"""

from collections.abc import Hashable
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from octavo.backends import AttentionCall, Backend, Prepared
from octavo.planning.form import PlanForm, keys_class
from octavo.problem import AttentionSpec
from octavo.shapes import LogSumExp, Output, Tensor

MAX_LOOKS = 4096

Unchecked = Any
"""A tensor, if the caller was right."""
Value = TypeVar("Value")


class Remembered(Generic[Value]):
    """What was worked out for a look; forgets everything when there are too many."""

    def __init__(self) -> None:
        self._values: dict[Hashable, Value] = {}

    def get(self, look: Hashable) -> Value | None:
        return self._values.get(look)

    def put(self, look: Hashable, value: Value) -> Value:
        if len(self._values) >= MAX_LOOKS:
            self._values.clear()
        self._values[look] = value
        return value


def look_of(x: Unchecked) -> tuple[Hashable, ...]:
    """Shape, dtype, device, strides and whether it begins on 16 bytes."""
    return x.shape, x.dtype, x.get_device(), x.is_contiguous() or x.stride(), x.data_ptr() & 15


def look_of_table(fields: tuple[Unchecked, ...], page_size: int) -> Hashable:
    """Of PagedBatch's fields; the page table grows with every step: only its class of length counts."""
    qo_indptr, page_table, kv_indptr, last_page_len, kv_lens = fields
    shape = page_table.shape
    return (
        qo_indptr.shape, qo_indptr.dtype, qo_indptr.get_device(), qo_indptr.is_contiguous(),
        shape[:-1], page_table.dtype, page_table.get_device(), page_table.stride(-1) == 1,
        keys_class(shape[-1] * page_size),
        kv_indptr is not None and _look_of_index(kv_indptr),
        last_page_len is not None and _look_of_index(last_page_len),
        kv_lens is not None and _look_of_index(kv_lens),
    )  # fmt: skip


def _look_of_index(x: Unchecked) -> Hashable:
    return x.shape, x.dtype, x.get_device(), x.is_contiguous()


def needs_gradient(q: Unchecked, k: Unchecked, v: Unchecked) -> bool:
    return (q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled()


class Ready(NamedTuple):
    """A checked kind of call."""

    spec: AttentionSpec
    backend: Backend
    form: PlanForm | None
    attend: Prepared
    scaled: bool
    """Whether sm_scale is a tensor that is read on the device."""
    out_like_q: bool
    out_form: tuple[tuple[int, ...], tuple[int, ...]]
    lse_form: tuple[tuple[int, ...], tuple[int, ...]]
    """Shapes and strides of results."""

    @classmethod
    def of(cls, call: AttentionCall, backend: Backend) -> "Ready":
        positive = call._replace(sm_scale=abs(call.sm_scale))
        q, (tokens, heads, _), dim = call.q, call.q.shape, call.spec.v_dim
        return cls(
            call.spec,
            backend,
            call.form,
            backend.prepare(positive),
            call.scale_tensor is not None,
            q.is_contiguous() and q.shape[2] == dim,
            ((tokens, heads, dim), (heads * dim, dim, 1)),
            ((tokens, heads), (heads, 1)),
        )

    def run(self, call: AttentionCall) -> None:
        if call.sm_scale < 0 or (call.scale_tensor is not None) != self.scaled:
            self.backend.attend(call)
        else:
            self.attend(call)

    def empty_outputs(self, q: Tensor) -> tuple[Output, LogSumExp]:
        """These ways to allocate take half as long as torch.empty."""
        out = (
            torch.empty_like(q)
            if self.out_like_q
            else torch.empty_strided(*self.out_form, dtype=q.dtype, device=q.device)
        )
        return out, torch.empty_strided(*self.lse_form, dtype=torch.float32, device=q.device)
