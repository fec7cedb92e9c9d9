"""Implementations found by import: `find` loads what it can and says why the rest is absent."""

import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

from octavo.bench.implementations import gathered, ours, peers, torch_extra
from octavo.bench.implementations.base import Implementation, Prepared, Result, Unsupported
from octavo.errors import fail

_TORCH = ("sdpa-cudnn", "sdpa-flash", "flex", "sdpa-gather")
RECORDED = ("octavo", "octavo-triton", *peers.NAMES, "torch-varlen", *_TORCH, "seed")
"""Names that go into a results file."""

UNPAGED = ("fa3-dense", "sdpa-cudnn", "sdpa-flash", "flex")
"""Peers that read contiguous K/V gathered before the clock: shown, but no bar for a paged kernel."""

DEFAULT = {
    "cuda": ("octavo", "octavo-triton", *peers.NAMES, "torch-varlen", "sdpa-cudnn", "sdpa-flash", "seed"),
    "cpu": ("octavo", "sdpa-gather"),
}

_LOADERS: dict[str, Callable[[str], Implementation]] = {
    "octavo": ours.load,
    "octavo-triton": ours.load,
    **dict.fromkeys(peers.NAMES, peers.load),
    **dict.fromkeys(torch_extra.NAMES, torch_extra.load),
    **dict.fromkeys(("sdpa-cudnn", "sdpa-flash", "sdpa-gather"), gathered.load),
}


def find(
    names: Iterable[str],
    peers_dir: str | None = None,
    adapters: Mapping[str, str] | None = None,
    on_load: Callable[[str], object] = lambda name: None,
) -> tuple[dict[str, Implementation], dict[str, str]]:
    """(implementations by name, reasons by absent name).

    Args:
        names: which to load, in order.
        peers_dir: folder with use_flashinfer.py and the like; put on sys.path.
        adapters: name -> Python file that defines `make(inputs) -> Prepared`; takes precedence.
        on_load: told each name before it is imported.
    """
    if peers_dir and peers_dir not in sys.path:
        sys.path.insert(0, str(Path(peers_dir).resolve()))
    present, absent = {}, {}
    for name in names:
        on_load(name)
        try:
            present[name] = _load(name, adapters or {})
        except (Exception, SystemExit) as error:  # a foreign library may raise anything while it is imported
            absent[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return present, absent


def _load(name: str, adapters: Mapping[str, str]) -> Implementation:
    if name in adapters:
        return _load_file(name, adapters[name])
    if name not in _LOADERS:
        raise ImportError(f"no adapter of this name; fix: --adapter {name}=FILE.py, or one of {', '.join(_LOADERS)}")
    return _LOADERS[name](name)


def _load_file(name: str, path: str) -> Implementation:
    file = Path(path).resolve()
    spec = importlib.util.spec_from_file_location(f"octavo_adapter_{file.stem}", file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ImportError(f"expected a Python file, got {path}; fix: --adapter {name}=FILE.py")
    module = importlib.util.module_from_spec(spec)
    # The file's own folder: an adapter may import what lies beside it.
    sys.path.append(str(file.parent))
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return Implementation(name, partial(_call_make, module.make), dict(getattr(module, "VERSIONS", {})))


def _call_make(make: Callable[..., Prepared], inputs: object) -> Prepared:
    prepared = make(inputs)
    if not isinstance(prepared, Prepared):
        fail("make", "a Prepared", type(prepared).__name__, "see docs/benchmarks.md", TypeError)
    return prepared


__all__ = ["DEFAULT", "RECORDED", "UNPAGED", "Implementation", "Prepared", "Result", "Unsupported", "find"]
