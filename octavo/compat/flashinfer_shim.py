"""A module named `flashinfer` made of Octavo, and FlashInfer's own attention tests run against it.

    python -m octavo.compat.flashinfer_shim [--single octavo] [--sample N] [--cpu] tests/attention/test_x.py ...

runs pytest in the current folder, a checkout of FlashInfer of which only tests/ is needed. Calls for one sequence,
which those tests take as their reference, are served by float32 PyTorch, or with --single octavo by Octavo itself. A
test that needs what Octavo does not carry is skipped, with the reason. --sample N runs N of each test's parameters,
always the same; --cpu runs what needs no graph or stream on the CPU.
"""

import argparse
import contextlib
import importlib.abc
import importlib.machinery
import os
import random
import sys
import tempfile
import types
import unittest.mock
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from octavo.compat import flashinfer as octavo_flashinfer
from octavo.compat import flashinfer_reference
from octavo.compat.arguments import not_carried

OWN = ("attention", "cascade", "decode", "page", "prefill")
"""Submodules that are Octavo's."""
ELSEWHERE = (
    *("activation", "concat_ops", "fp4_quantization", "gemm", "jit", "norm", "pod", "quantization", "rope"),
    *("sampling", "sparse", "utils"),
)
"""Submodules that can be imported, but whose functions are not carried; what the tests need of them is in _EXTRAS."""


class MissingJITCacheError(RuntimeError):
    """FlashInfer's, never raised here: nothing is compiled ahead of time."""


class GPUArchitectureError(RuntimeError):
    """FlashInfer's, never raised here."""


class JitSpec:
    """FlashInfer's, in annotations only."""


class _Placeholder(types.ModuleType):
    """Any name that it does not hold is a function which refuses to be called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Refusal(f"{self.__name__}.{name}")


class _Refusal:
    """Stands for a function or class that Octavo does not carry."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: object, **options: object) -> NoReturn:
        not_carried(self._name, "it is no part of paged attention")

    def __or__(self, other: object) -> "_Refusal":
        return self

    __ror__ = __or__

    def __getattr__(self, name: str) -> "_Refusal":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Refusal(f"{self._name}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Placeholders for submodules below `flashinfer`; other names there do not exist."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> Any:
        first, _, rest = fullname.partition(".")
        if first != "flashinfer" or rest.partition(".")[0] not in ELSEWHERE:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Placeholder(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        for name, value in _EXTRAS.get(module.__name__, {}).items():
            setattr(module, name, value)


def _capability(device: Any = None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (9, 0)


def _is_hopper(device: Any = None) -> bool:
    return _capability(device)[0] == 9


def _no(*args: object, **options: object) -> bool:
    return False


def _yes(*args: object, **options: object) -> bool:
    return True


_EXTRAS: dict[str, dict[str, Any]] = {
    "flashinfer.jit": {"MissingJITCacheError": MissingJITCacheError, "JitSpec": JitSpec},
    "flashinfer.quantization": {
        "packbits": flashinfer_reference.packbits,
        "segment_packbits": flashinfer_reference.segment_packbits,
    },
    "flashinfer.utils": {
        "GPUArchitectureError": GPUArchitectureError,
        "get_compute_capability": _capability,
        "has_flashinfer_jit_cache": _yes,
        "is_fa3_backend_supported": _is_hopper,
        "is_fa3_prefill_head_dim_supported": _yes,
        "is_sm90a_supported": _is_hopper,
        "is_sm100a_supported": _no,
        "is_sm12x_supported": _no,
    },
}


def install(single: str = "octavo") -> types.ModuleType:
    """Put `flashinfer`, made of Octavo, into sys.modules; the module.

    Args:
        single: who serves single_prefill_with_kv_cache and single_decode_with_kv_cache: "octavo", or "reference" for
            float32 PyTorch.
    """
    if single not in ("octavo", "reference"):
        raise ValueError(f"single: expected 'octavo' or 'reference', got {single!r}; fix: 'octavo'")
    for name in [name for name in sys.modules if name == "flashinfer" or name.startswith("flashinfer.")]:
        del sys.modules[name]
    root = _Placeholder("flashinfer")
    root.__path__ = []
    vars(root)["__version__"] = "0.6.18"
    modules = {"": (root, octavo_flashinfer)}
    modules |= {name: (_Placeholder(f"flashinfer.{name}"), getattr(octavo_flashinfer, name)) for name in OWN}
    for name, (module, source) in modules.items():
        for public in source.__all__:
            setattr(module, public, getattr(source, public))
            if single == "reference" and hasattr(flashinfer_reference, public):
                setattr(module, public, getattr(flashinfer_reference, public))
        sys.modules[module.__name__] = module
        if name:
            setattr(root, name, module)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    for name in ELSEWHERE:
        setattr(root, name, importlib.import_module(f"flashinfer.{name}"))
    for name in ("packbits", "segment_packbits"):
        setattr(root, name, getattr(flashinfer_reference, name))
    return root


class _Plugin:
    """Of pytest: skips what is not carried, and keeps a sample of each test's parameters."""

    def __init__(self, sample: int | None) -> None:
        self._sample = sample

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        if self._sample is None:
            return
        tests: dict[str, list[Any]] = {}
        for item in items:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
        kept = [x for name, group in tests.items() for x in _sample_of(name, group, self._sample)]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept

    def pytest_pyfunc_call(self, pyfuncitem: Any) -> Any:
        import pytest

        arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
        try:
            pyfuncitem.obj(**arguments)
        except NotImplementedError as error:
            if "not carried by octavo" in str(error):
                pytest.skip(str(error))
            raise
        return True


def _sample_of(name: str, items: list[Any], size: int) -> list[Any]:
    chosen = set(random.Random(name).sample(range(len(items)), min(size, len(items))))
    return [item for i, item in enumerate(items) if i in chosen]


class _OnCpu(torch.overrides.TorchFunctionMode):
    """Everything that is asked for on a CUDA device is made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], int):
            args = (args[0], "cpu", *args[2:])
        named = {name: _host(x) for name, x in (kwargs or {}).items()}
        return func(*(_host(x) for x in args), **named)


class _HostGenerator(torch.Generator):
    """A generator on the CPU, whatever is asked for."""

    def __new__(cls, device: Any = None) -> "_HostGenerator":
        return super().__new__(cls)


def _host(x: Any) -> Any:
    cuda = (isinstance(x, str) and x.startswith("cuda")) or (isinstance(x, torch.device) and x.type == "cuda")
    return "cpu" if cuda else x


def main(arguments: Sequence[str] | None = None) -> int:
    """Run pytest with the module installed; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m octavo.compat.flashinfer_shim", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--single", choices=("reference", "octavo"), default="reference")
    parser.add_argument("--sample", type=int)
    parser.add_argument("--cpu", action="store_true")
    options, rest = parser.parse_known_args(arguments)
    install(options.single)
    sys.path.insert(0, "")
    run = ["-p", "no:cacheprovider", *rest]
    with tempfile.TemporaryDirectory() as folder:
        _for_children(folder, options.single)
        return _run_pytest(run, options.sample, options.cpu)


def _for_children(folder: str, single: str) -> None:
    """Processes that tests start find a package `flashinfer`, which installs the module, in `folder`."""
    package = Path(folder, "flashinfer")
    package.mkdir()
    text = f"from octavo.compat.flashinfer_shim import install\n\ninstall({single!r})\n"
    (package / "__init__.py").write_text(text)
    os.environ["PYTHONPATH"] = os.pathsep.join(x for x in (folder, os.environ.get("PYTHONPATH")) if x)


def _run_pytest(run: list[str], sample: int | None, cpu: bool) -> int:
    import pytest

    plugins = [_Plugin(sample)]
    if not cpu:
        return int(pytest.main(run, plugins=plugins))
    absent = {"torch.cuda.synchronize": _no, "torch.Generator": _HostGenerator}
    with contextlib.ExitStack() as stack:
        for name, value in absent.items():
            stack.enter_context(unittest.mock.patch(name, value))
        stack.enter_context(_OnCpu())
        return int(pytest.main(run, plugins=plugins))


if __name__ == "__main__":
    sys.exit(main())
