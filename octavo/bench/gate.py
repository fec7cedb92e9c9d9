"""The correctness gate before every timing: sampled rows against the oracle. A wrong implementation gets no time."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from octavo.bench.implementations import Prepared
from octavo.bench.sampling import sample_rows
from octavo.bench.verify import Verdict, verify_rows
from octavo.bench.workloads import Inputs
from octavo.reference import reference
from octavo.shapes import Tensor

MAX_ROWS, MAX_KEYS = 24, 200_000


@dataclass(frozen=True, eq=False)
class Gate:
    """One problem's inputs and the rows to compare."""

    inputs: Inputs
    rows: tuple[int, ...]

    @classmethod
    def of(cls, inputs: Inputs) -> "Gate":
        rows = sample_rows(inputs.spec, inputs.batch, inputs.q.shape[0], max_rows=MAX_ROWS, max_keys=MAX_KEYS)
        return cls(inputs, tuple(rows))

    def check(self, prepared: Prepared, call: Callable[[], object]) -> tuple[Verdict, Tensor]:
        """Call into poisoned memory and compare; also a copy of `out`."""
        for buffer in prepared.buffers:
            buffer.fill_(math.nan)
        # What the call allocates comes from PyTorch's pool: leave NaN there too.
        torch.full_like(self.inputs.q, math.nan)
        out, lse = prepared.canonical(call())
        return self.judge(out, lse), out.clone()

    def judge(self, out: Tensor, lse: Tensor | None) -> Verdict:
        i = self.inputs
        if lse is None:
            lse = self._exact_lse()
        return verify_rows(i.spec, i.q, i.kv, i.batch, out, lse, self.rows)

    def _exact_lse(self) -> Tensor:
        """For implementations that return none: the oracle's, so that only `out` is judged."""
        i = self.inputs
        lse = torch.zeros(i.q.shape[0], i.spec.num_qo_heads, dtype=torch.float32)
        exact = reference(i.spec, i.q, i.kv.k_cache, i.kv.v_cache, i.batch, rows=self.rows)[1]
        lse[list(self.rows)] = exact.float()
        return lse.to(i.q.device)
