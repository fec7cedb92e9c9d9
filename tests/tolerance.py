"""The tolerance rule as an assertion. The rule itself is octavo.bench.verify's: one for tests, bench and the CLI."""

import torch
from inputs import Problem
from torch import Tensor

from octavo.bench.verify import verify_rows


def assert_matches(p: Problem, out: Tensor, lse: Tensor, rows: list[int] | None = None) -> None:
    """(out, lse) of a whole call against the oracle, in all its rows or in `rows`."""
    assert out.dtype == p.q.dtype and lse.dtype == torch.float32
    assert out.device == p.q.device and lse.device == p.q.device
    wanted = list(range(p.q.shape[0])) if rows is None else rows
    scale = None if p.sm_scale is None else float(p.sm_scale)
    verdict = verify_rows(p.spec, p.q, p.kv, p.batch, out, lse, wanted, scale)
    assert verdict.ok, verdict.message
    assert verdict.rows == len(wanted)
