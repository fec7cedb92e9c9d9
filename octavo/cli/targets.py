"""What the contract is checked on: backends with their devices, and inputs full of NaN that must not be read."""

import math
from dataclasses import dataclass, replace

import torch

from octavo.api import attend
from octavo.backends import BACKENDS, arch_of, resolve
from octavo.bench.verify import verify_rows
from octavo.bench.workloads import Inputs, Workload, make_inputs
from octavo.errors import fail
from octavo.problem import AttentionSpec
from octavo.reference import page_ids
from octavo.shapes import Tensor

PADDING_ROWS = 2


class Skip(Exception):
    """The case does not apply to this target; the message says why."""


@dataclass(frozen=True)
class Target:
    """One backend on one device."""

    backend: str
    device: torch.device

    def __str__(self) -> str:
        return f"{self.backend} on {self.device}" + (" (interpreted)" if self.interpreted else "")

    @property
    def interpreted(self) -> bool:
        return self.backend != "cpu" and self.device.type == "cpu"

    def fit(self, spec: AttentionSpec, *, exact: bool = False) -> AttentionSpec:
        """The spec as this target takes it: float16 for bfloat16 under Triton's interpreter, unless `exact`.

        Raises Skip where the target can't take it.
        """
        if self.interpreted and spec.dtype == torch.bfloat16:
            if exact:
                raise Skip("Triton's interpreter multiplies bfloat16 tiles as raw bits")
            spec = replace(spec, dtype=torch.float16)
        reason = next(b for b in BACKENDS if b.name == self.backend).reject(spec, arch_of(self.device))
        if reason:
            raise Skip(reason)
        return spec

    def attend(self, p: Inputs, sm_scale: float | None = None) -> tuple[Tensor, Tensor]:
        return attend(p.q, p.kv, p.batch, sm_scale=sm_scale, causal=p.spec.causal, backend=self.backend)

    @property
    def by_name(self) -> str:
        """What to pass as an op's backend: "" where the op takes this one by itself."""
        return "" if resolve(None, arch_of(self.device)).backend.name == self.backend else self.backend


def targets(backend: str | None = None) -> list[Target]:
    """Every backend that can run here, with each kind of device that it serves; or only `backend`."""
    devices = [torch.device("cpu")] + ([torch.device("cuda", 0)] if torch.cuda.is_available() else [])
    found = [Target(b.name, d) for d in devices for b in BACKENDS if b.reject(None, arch_of(d)) is None]
    names = [b.name for b in BACKENDS]
    if backend is not None and backend not in names:
        fail("--backend", f"one of {', '.join(names)}", repr(backend), "see `octavo info`")
    chosen = [t for t in found if backend in (None, t.backend)]
    if not chosen:
        reasons = {b.reject(None, arch_of(d)) for d in devices for b in BACKENDS if b.name == backend}
        why = "; ".join(sorted(r for r in reasons if r))
        fail("--backend", "one that can run here", f"{backend!r} ({why})", "see `octavo info`")
    return chosen


def poisoned(workload: Workload, spec: AttentionSpec, target: Target, seed: int = 0) -> Inputs:
    """Random inputs in which unused pages, tails of last pages and padding query rows are NaN."""
    p = make_inputs(workload, spec, target.device, seed=seed)
    used = torch.zeros(p.kv.num_pages, spec.page_size, dtype=torch.bool)
    for sequence, kv_len in enumerate(workload.kv_lens):
        ids = page_ids(p.batch, sequence, -(-kv_len // spec.page_size)).cpu()
        slots = torch.arange(len(ids) * spec.page_size).view(-1, spec.page_size) < kv_len
        used[ids] = slots
    unused = ~used.to(target.device)
    p.kv.k_cache[unused] = math.nan
    p.kv.v_cache[unused] = math.nan
    padding = p.q.new_full((PADDING_ROWS, *p.q.shape[1:]), math.nan)
    return replace(p, q=torch.cat([p.q, padding]))


def judge(p: Inputs, out: Tensor, lse: Tensor, sm_scale: float | None = None) -> str:
    """Why a result is wrong in some row, or ""."""
    return verify_rows(p.spec, p.q, p.kv, p.batch, out, lse, range(p.q.shape[0]), sm_scale).message
