"""Inputs from public bug reports, on every backend."""

import functools

import pytest
import torch
from cases import CASES
from inputs import Case
from tolerance import assert_matches

from octavo import run


def make(backend, qo_lens, kv_lens, **fields):
    return backend.build(Case("reported", qo_lens, kv_lens, **{"heads": (32, 4), "dims": (128, 128), **fields}))


def marks(regression):
    return (pytest.mark.gpu, pytest.mark.heavy) if regression.heavy else ()


@pytest.mark.parametrize("regression", [pytest.param(c, id=c.name, marks=marks(c)) for c in CASES])
def test_reported_case(backend, regression):
    if regression.heavy and backend.device == "cpu":
        pytest.skip("some GB; runs on a GPU")
    made = regression.make(functools.partial(make, backend))
    problem, rows = made if isinstance(made, tuple) else (made, None)
    first = backend.attend(problem)
    assert_matches(problem, *first, rows=rows)
    if not regression.heavy and not backend.interpreted:
        # Again, as a later layer calls it: a cached plan, kernel or launch must serve as well as the first.
        again = backend.attend(problem)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


def test_indptr_lengths_differ(backend):
    """flashinfer-ai/flashinfer#362: must raise, never return numbers."""
    p = make(backend, (3, 5), (20, 70), seed=28)
    b = p.batch
    with pytest.raises(ValueError, match=r"kv_indptr: expected .* got 1; fix: "):
        run(p.q, p.kv.k_cache, p.kv.v_cache, b.qo_indptr, b.kv_indptr[:1], b.page_table)
