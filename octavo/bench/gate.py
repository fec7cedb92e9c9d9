"""The correctness gate before every timing: rows against the oracle. A wrong implementation gets no time."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from octavo.bench.estimate import estimate, furthest_rows
from octavo.bench.implementations import Prepared, Result
from octavo.bench.sampling import sample_rows
from octavo.bench.verify import Oracle, Verdict
from octavo.bench.workloads import Inputs
from octavo.shapes import LogSumExp, Output, Tensor

MAX_ROWS, MAX_KEYS = 8, 100_000
SUSPECTS = 3


def same_bits(result: Result, other: Result) -> bool:
    return all(torch.equal(a, b) for a, b in zip(result, other, strict=True) if a is not None and b is not None)


@dataclass(frozen=True, eq=False)
class Gate:
    """One problem's inputs, the rows that are always compared, and an estimate of all rows.

    What the oracle sees of an implementation: `rows`, and those of all rows that are the furthest from the estimate.
    """

    inputs: Inputs
    rows: tuple[int, ...]
    estimate: tuple[Output, LogSumExp]
    oracle: Oracle

    @classmethod
    def of(cls, inputs: Inputs) -> "Gate":
        rows = sample_rows(inputs.spec, inputs.batch, inputs.q.shape[0], max_rows=MAX_ROWS, max_keys=MAX_KEYS)
        oracle = Oracle(inputs.spec, inputs.q, inputs.kv, inputs.batch)
        return cls(inputs, tuple(rows), estimate(inputs), oracle)

    def check(
        self, prepared: Prepared, call: Callable[[], object], checked: Result | None = None, lse_slack: float = 0.0
    ) -> tuple[Verdict, Result]:
        """Call into poisoned memory and judge; also a copy of the result. The bits of `checked` need no second look.

        lse may be off by lse_slack more than the rule says.
        """
        for buffer in prepared.buffers:
            buffer.fill_(math.nan)
        # What the call allocates comes from PyTorch's pool: leave NaN there too.
        torch.full_like(self.inputs.q, math.nan)
        out, lse = prepared.canonical(call())
        if checked is not None and same_bits((out, lse), checked):
            return Verdict(True, 0, 0, 0.0), checked
        return self.judge(out, lse, lse_slack), (out.clone(), None if lse is None else lse.clone())

    def judge(self, out: Output, lse: LogSumExp | None, lse_slack: float = 0.0) -> Verdict:
        if out.shape != self.estimate[0].shape:
            return Verdict(False, 0, 0, math.inf, f"expected out {list(self.estimate[0].shape)}, got {list(out.shape)}")
        rows = {*self.rows, *furthest_rows(out.float(), self.estimate[0], SUSPECTS)}
        if lse is not None and lse.shape == self.estimate[1].shape:
            rows |= {*furthest_rows(lse, self.estimate[1], 1)}
        if lse is None:
            lse = self._exact_lse(sorted(rows))
        return self.oracle.verify(out, lse, sorted(rows), lse_slack)

    def _exact_lse(self, rows: list[int]) -> Tensor:
        """For implementations that return none: the oracle's, so that only `out` is judged."""
        q = self.inputs.q
        lse = torch.zeros(q.shape[0], self.inputs.spec.num_qo_heads, dtype=torch.float32)
        lse[rows] = torch.stack([row.lse for row in self.oracle.exact(rows)]).float()
        return lse.to(q.device)
