"""Backends, and the choice among them: `resolve(spec, arch)` is pure and says why each other one was rejected."""

import functools
from dataclasses import dataclass

from octavo.backends.arch import arch_of
from octavo.backends.base import AttentionCall, Backend, Prepared
from octavo.backends.cpu import CpuBackend
from octavo.backends.hopper import HopperBackend
from octavo.backends.triton import TritonBackend
from octavo.errors import fail
from octavo.problem import Arch, AttentionSpec

BACKENDS: tuple[Backend, ...] = (CpuBackend(), HopperBackend(), TritonBackend())
"""In order of preference; each rejects what it cannot serve."""


@dataclass(frozen=True)
class Choice:
    backend: Backend
    rejected: tuple[tuple[str, str], ...]
    """(name, reason) of each backend that was preferred but cannot serve, or was passed over."""


@functools.lru_cache(maxsize=1024)
def resolve(spec: AttentionSpec | None, arch: Arch, override: str | None = None) -> Choice:
    """The first backend that serves `spec` on `arch`; `override` names the one to take.

    Raises ValueError when the named one, or every one, cannot serve; the message holds each reason.
    """
    names = [b.name for b in BACKENDS]
    if override and override not in names:
        fail("backend", f"one of {names}", repr(override), "leave it out to let octavo choose")
    chosen, rejected = None, []
    for backend in BACKENDS:
        reason = backend.reject(spec, arch)
        if reason is None and override and backend.name != override:
            reason = f"{override} was asked for"
        if reason is None and chosen is not None:
            reason = f"{chosen.name} is preferred"
        if reason is None:
            chosen = backend
        else:
            rejected.append((backend.name, reason))
    if chosen is None:
        why = "; ".join(f"{name}: {reason}" for name, reason in rejected if not override or name == override)
        fail("backend", f"one that serves {spec} on {arch.name}", why, "leave backend out, or see `octavo info`")
    return Choice(chosen, tuple(rejected))


__all__ = ["BACKENDS", "AttentionCall", "Backend", "Choice", "Prepared", "arch_of", "resolve"]
