"""The backends that can run here, each with the device its tensors live on."""

import os
from dataclasses import dataclass, replace

import pytest
import torch
from inputs import BF16, FP16, Case, Problem, build

from octavo import BatchAttention, attend, merge, ops
from octavo.backends import BACKENDS, arch_of, resolve
from octavo.backends.arch import interpreting

INTERPRETER_WORK = 700_000
"""Most (query row, key) pairs of one case under Triton's interpreter, which takes seconds for more."""


@dataclass(frozen=True)
class Target:
    name: str
    device: str

    @property
    def interpreted(self) -> bool:
        return self.name != "cpu" and self.device == "cpu"

    def build(self, case: Case) -> Problem:
        """The case's tensors; skips where this backend says it cannot serve them, or the interpreter is too slow."""
        if self.interpreted:
            pairs = sum(n * m for n, m in zip(case.qo_lens, case.kv_lens, strict=True)) * case.heads[0]
            if pairs > INTERPRETER_WORK:
                pytest.skip(f"{pairs} (row, key) pairs are slow under Triton's interpreter")
            # The interpreter multiplies bfloat16 tiles as raw bits.
            case = replace(case, dtype=FP16 if case.dtype == BF16 else case.dtype)
        self.require(case.spec)
        return build(case, self.device)

    def require(self, spec) -> None:
        backend = next(b for b in BACKENDS if b.name == self.name)
        reason = backend.reject(spec, arch_of(torch.device(self.device)))
        if reason is not None:
            pytest.skip(f"{self.name} does not serve {spec}: {reason}")

    def attend(self, p: Problem, **options):
        return attend(p.q, p.kv, p.batch, sm_scale=p.sm_scale, causal=p.spec.causal, backend=self.name, **options)

    def plan(self, p: Problem, **bounds) -> BatchAttention:
        attention = BatchAttention(p.spec, device=self.device, backend=self.name, **bounds)
        attention.plan(p.batch, num_tokens=p.q.shape[0])
        return attention

    def append(self, k, v, kv, batch) -> None:
        ops.append(k, v, kv.k_cache, kv.v_cache, ops.pack_batch(batch), self._keyless())

    def merge(self, states):
        if self._keyless():
            return ops.merge([out for out, _ in states], [lse for _, lse in states], self.name)
        return merge(states)

    def _keyless(self) -> str:
        """Name to force where append and merge, which take no spec, would choose another backend."""
        arch = arch_of(torch.device(self.device))
        return "" if resolve(None, arch).backend.name == self.name else self.name


def targets() -> list[pytest.param]:
    if os.environ.get("TRITON_INTERPRET") == "1":
        assert interpreting()
        return [pytest.param(Target("triton", "cpu"), id="triton-interpreted", marks=pytest.mark.interpreter)]
    found = [pytest.param(Target("cpu", "cpu"), id="cpu")]
    if torch.cuda.is_available():
        arch = arch_of(torch.device("cuda"))
        usable = [b.name for b in BACKENDS if b.reject(None, arch) is None]
        found += [pytest.param(Target(name, "cuda"), id=f"{name}-cuda", marks=pytest.mark.gpu) for name in usable]
    return found
