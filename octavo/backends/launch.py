"""Launching Triton kernels at little host cost."""

import importlib
from collections.abc import Hashable
from contextlib import nullcontext
from typing import Any

import torch

from octavo.shapes import Tensor


class Launcher:
    """One kernel and its compiled forms, found by a key.

    Triton's own launcher inspects every argument of every call to find the compiled form, some 50 us for these kernels.
    Here the caller names, by `key`, all that the form depends on: constants, dtypes, strides, alignment, device.
    """

    def __init__(self, module: str, name: str) -> None:
        self._module, self._name = module, name
        self._forms: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        key: Hashable,
        arguments: tuple[Any, ...],
        constants: dict[str, Any],
        options: dict[str, int] | None = None,
    ) -> None:
        """Launch on the current device and stream. `constants` are the kernel's constexprs, last in its signature."""
        form = self._forms.get(key)
        if form is None:
            function = getattr(importlib.import_module(self._module), self._name)
            compiled = function[grid](*arguments, **constants, **(options or {}))
            if compiled is not None:  # the interpreter compiles nothing
                self._forms[key] = compiled, tuple(constants.values())
            return
        compiled, tail = form
        compiled[grid](*[a.data_ptr() if isinstance(a, Tensor) else a for a in arguments], *tail)


class Zeros:
    """int32 zeros that every kernel which takes them leaves zero: one buffer a device and stream, as work of one
    stream follows itself."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.device, int], Tensor] = {}

    def take(self, count: int, device: torch.device) -> Tensor:
        """At least `count` zeros. A graph gets its own, as it may be replayed beside other work of its stream."""
        stream = 0
        if device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                return torch.zeros(count, dtype=torch.int32, device=device)
            stream = torch.cuda.current_stream(device).cuda_stream
        buffer = self._buffers.get((device, stream))
        if buffer is None or buffer.numel() < count:
            buffer = torch.zeros(count, dtype=torch.int32, device=device)
            self._buffers[device, stream] = buffer
        return buffer


def alignment(*tensors: Tensor) -> int | tuple[bool, ...]:
    """Key part: which tensors start on 16 bytes, as Triton specialises on it; 0 when all do."""
    together = 0
    for x in tensors:
        together |= x.data_ptr()
    return together & 15 and tuple(x.data_ptr() % 16 == 0 for x in tensors)


def on_device_of(x: Tensor) -> Any:
    """Context in which launches go to x's device."""
    if x.device.type != "cuda" or x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)
