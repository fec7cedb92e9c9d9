"""Launching Triton kernels at little host cost."""

import importlib
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from octavo.shapes import Tensor

Value = TypeVar("Value")


class _Compiled(NamedTuple):
    kernel: Any
    start: Callable[..., None]
    """Triton's launcher in C: (grid, stream, function, metadata, three for hooks, arguments)."""
    function: int
    metadata: Any
    pointers: list[bool]
    """Which arguments are tensors."""
    constants: tuple[Any, ...]
    device: int
    knobs: Any

    def hooked(self) -> bool:
        """Whether somebody, such as a profiler, wants to be told of launches."""
        hook = self.knobs.launch_enter_hook
        return bool(getattr(hook, "calls", hook))


class Launch:
    """One form of a kernel: dtypes, strides, alignment and device of its arguments are the same at every call.

    Triton's own launcher inspects every argument of every call to find the compiled form, some 50 us for these kernels;
    what it returns, called as documented, still takes some 10 us to ask for hooks, device and stream.
    """

    def __init__(self, module: str, name: str, constants: dict[str, Any], options: dict[str, int] | None) -> None:
        self._module, self._name = module, name
        self._constants, self._options = constants, options or {}
        self._compiled: _Compiled | None = None

    def __call__(self, grid: tuple[int, int, int], arguments: tuple[Any, ...]) -> None:
        """Launch on the current stream of the arguments' device."""
        compiled = self._compiled
        if compiled is None:
            self._compile(grid, arguments)
            return
        device = compiled.device
        if torch.cuda.current_device() != device:
            with torch.cuda.device(device):
                self(grid, arguments)
            return
        values = [x.data_ptr() if is_pointer else x for x, is_pointer in zip(arguments, compiled.pointers, strict=True)]
        if compiled.hooked():
            compiled.kernel[grid](*values, *compiled.constants)
            return
        stream, function, metadata = current_stream(device), compiled.function, compiled.metadata
        compiled.start(*grid, stream, function, metadata, None, None, None, *values, *compiled.constants)

    def _compile(self, grid: tuple[int, int, int], arguments: tuple[Any, ...]) -> None:
        kernel = getattr(importlib.import_module(self._module), self._name)
        pointers = [isinstance(x, Tensor) for x in arguments]
        device = next(x.get_device() for x in arguments if isinstance(x, Tensor))
        with torch.cuda.device(device) if device >= 0 else nullcontext():
            compiled = kernel[grid](*arguments, **self._constants, **self._options)
        if compiled is None:  # the interpreter compiles nothing
            return
        from triton import knobs

        self._compiled = _Compiled(
            compiled,
            compiled.run,
            compiled.function,
            compiled.packed_metadata,
            pointers,
            tuple(self._constants.values()),
            device,
            knobs.runtime,
        )


class Launcher:
    """One kernel and its forms, found by a key.

    The caller names, by `key`, all that the form depends on: constants, dtypes, strides, alignment, device.
    """

    def __init__(self, module: str, name: str) -> None:
        self._module, self._name = module, name
        self._forms: dict[Hashable, Launch] = {}

    def form(self, key: Hashable, constants: dict[str, Any], options: dict[str, int] | None = None) -> Launch:
        """`constants` are the kernel's constexprs, last in its signature."""
        form = self._forms.get(key)
        if form is None:
            form = self._forms[key] = Launch(self._module, self._name, constants, options)
        return form


class Scratch:
    """Memory that calls share, one after the other: what they write, and int32 zeros that each leaves zero.

    One buffer of either a device and stream, as work of one stream follows itself. A graph gets its own, as it may be
    replayed beside other work of its stream.
    """

    def __init__(self) -> None:
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}

    def take(self, words: int, zeros: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """(at least `words` float32 of any content, at least `zeros` int32 zeros)."""
        stream = 0
        if device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                return _scratch(words, zeros, device)
            stream = current_stream(device.index)
            # Default streams of all devices have the same handle.
            stream = stream << 8 | device.index + 1
        found = self._buffers.get(stream)
        if found is None or found[0].numel() < words or found[1].numel() < zeros:
            if found is not None:
                words, zeros = max(words, found[0].numel()), max(zeros, found[1].numel())
            found = self._buffers[stream] = kept(partial(_scratch, words, zeros, device), device)
        return found


def kept(make: Callable[[], Value], device: torch.device) -> Value:
    """What `make` allocates on the current stream, to be kept from call to call.

    In a thread of its own, as what a thread allocates while PyTorch's compiled graphs warm up is taken for the graph's.
    """
    if device.type != "cuda":
        return make()
    stream = torch.cuda.current_stream(device)

    def make_on_stream() -> Value:
        with torch.cuda.stream(stream):
            return make()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make_on_stream).result()


def _scratch(words: int, zeros: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return (
        torch.empty(words, dtype=torch.float32, device=device),
        torch.zeros(zeros, dtype=torch.int32, device=device),
    )


def current_stream(device: int) -> int:
    """The current stream's handle, as Triton's driver asks for it: torch.cuda.current_stream takes 2 us."""
    return torch._C._cuda_getCurrentRawStream(device)


def alignment(*tensors: Tensor) -> int | tuple[bool, ...]:
    """Key part: which tensors start on 16 bytes, as Triton specialises on it; 0 when all do."""
    together = 0
    for x in tensors:
        together |= x.data_ptr()
    return together & 15 and tuple(x.data_ptr() % 16 == 0 for x in tensors)
