"""How a call looks: all that checks and the choice of launches can see of it, cheap to read and to compare.

What follows from it is worked out once: a call that looks like an earlier one is neither checked nor dispatched again.
"""

from collections.abc import Hashable
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from octavo.backends import AttentionCall, Backend, Prepared
from octavo.planning.form import PlanForm, keys_class
from octavo.problem import AttentionSpec

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


def look_of(x: Unchecked) -> Hashable:
    """Shape, dtype, device, strides and whether it begins on 16 bytes."""
    if x is None:
        return None
    return x.shape, x.dtype, x.get_device(), x.is_contiguous() or x.stride(), x.data_ptr() & 15


def look_of_table(fields: tuple[Unchecked, ...], page_size: int) -> Hashable:
    """As look_of, of PagedBatch's fields; the page table grows with every step: only its class of length counts."""
    qo_indptr, page_table, kv_indptr, last_page_len, kv_lens = fields
    entries = page_table.shape[-1]
    pages = (page_table.shape[:-1], page_table.dtype, page_table.get_device(), page_table.stride(-1) == 1)
    return (
        pages,
        keys_class(entries * page_size),
        look_of_index(qo_indptr),
        look_of_index(kv_indptr),
        look_of_index(last_page_len),
        look_of_index(kv_lens),
    )


def look_of_index(x: Unchecked) -> Hashable:
    if x is None:
        return None
    return x.shape, x.dtype, x.get_device(), x.is_contiguous()


def needs_gradient(*tensors: Unchecked) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


class Ready(NamedTuple):
    """A checked kind of call."""

    spec: AttentionSpec
    backend: Backend
    form: PlanForm | None
    attend: Prepared
    scaled: bool
    """Whether sm_scale is a tensor that is read on the device."""

    @classmethod
    def of(cls, call: AttentionCall, backend: Backend) -> "Ready":
        positive = call._replace(sm_scale=abs(call.sm_scale))
        return cls(call.spec, backend, call.form, backend.prepare(positive), call.scale_tensor is not None)

    def __call__(self, call: AttentionCall) -> None:
        if call.sm_scale < 0 or (call.scale_tensor is not None) != self.scaled:
            self.backend.attend(call)
        else:
            self.attend(call)
