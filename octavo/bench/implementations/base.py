"""What an implementation under the benchmark is: a function from inputs to callables that compute them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from octavo.bench.workloads import Inputs
from octavo.problem import AttentionSpec
from octavo.shapes import Tensor

Result = tuple[Tensor, Tensor | None]
"""(out [tokens, qo_heads, value_dim], base-2 lse [tokens, qo_heads] or None where there is none)."""


class Unsupported(Exception):
    """Raised by `make` when an implementation does not serve a problem. Not a failure: the case is left out for it."""


def as_is(result: Any) -> Result:
    return result


@dataclass(frozen=True)
class Prepared:
    """One problem, ready to compute again and again.

    run: one layer's call, with the plan made last. Enqueues its work on the current stream.
    plan: what a serving engine calls once per step, or None.
    plan_on_device: `plan` only enqueues GPU work (then it is timed on the GPU, and counts), else it runs on the host.
    call: everything in one call, planning included, where an implementation has such a call of its own.
    canonical: turns what `run` returned into `Result`, outside the clock.
    buffers: outputs that `run` writes; filled with NaN before the check.
    backend: what was chosen inside, for the record.
    """

    run: Callable[[], Any]
    plan: Callable[[], object] | None = None
    plan_on_device: bool = False
    call: Callable[[], Any] | None = None
    canonical: Callable[[Any], Result] = as_is
    buffers: tuple[Tensor, ...] = ()
    backend: str = ""


@dataclass(frozen=True)
class Implementation:
    """A name and how to prepare it. `versions` names the libraries behind it."""

    name: str
    make: Callable[[Inputs], Prepared]
    versions: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


def require(condition: bool, reason: str) -> None:
    if not condition:
        raise Unsupported(reason)


PLAIN = ("num_qo_heads", "num_kv_heads", "head_dim", "value_dim", "page_size", "causal", "dtype")
"""Fields of a spec that every implementation looks at; the others select variants."""


def variants_of(spec: AttentionSpec) -> list[str]:
    """What a spec asks for beyond softmax over all visible keys, as "field=value"."""
    asked = [f for f in fields(spec) if f.name not in PLAIN and getattr(spec, f.name) != f.default]
    return [f"{f.name}={getattr(spec, f.name)}" for f in asked]


def require_plain(spec: AttentionSpec) -> None:
    """Raises Unsupported for a spec with variants."""
    asked = variants_of(spec)
    require(not asked, f"serves no {', '.join(asked)}")
