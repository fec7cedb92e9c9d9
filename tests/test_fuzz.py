"""Reject or correct: whatever comes in, either an error names the fix, or the result is the oracle's."""

import math
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from inputs import (
    BAD_PAGE,
    BF16,
    FP16,
    FP32,
    I32,
    I64,
    KV_STORAGE,
    Q_STORAGE,
    Case,
    Problem,
    build,
    copied,
    new_tokens,
    storage_of,
    without_poison,
    write_in_loops,
)
from targets import Target
from tolerance import assert_matches

import octavo
from octavo import PagedBatch, PagedKV

MESSAGE = re.compile(r".+: expected .+, got .+; fix: .+", re.DOTALL)
LENGTHS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 40)), max_size=5)
HOPPER_DIMS = (64, 128, 256)
DIMS = st.sampled_from(((16, 16), (24, 24), (33, 33), (40, 64), (64, 48), (80, 80), (128, 128)))


@st.composite
def cases(draw) -> Case:
    """Valid problems of any shape, storage and index form."""
    lengths = draw(LENGTHS)
    dims = draw(DIMS)
    storages = [s for s in KV_STORAGE if dims[0] == dims[1] or s not in ("combined", "combined hnd", "two pools")]
    storage = draw(st.sampled_from([s for s in storages if dims[0] == dims[1] or s != "all layers"]))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.sampled_from((1, 2, 3, 5, 8)))
    return Case(
        "fuzz",
        tuple(q for q, _ in lengths),
        tuple(kv for _, kv in lengths),
        (kv_heads * group, kv_heads),
        dims,
        page_size=draw(st.sampled_from((1, 1, 2, 3, 7, 16, 33))),
        causal=draw(st.booleans()),
        dtype=draw(st.sampled_from((torch.bfloat16, FP16, FP32))),
        dense=draw(st.booleans()),
        index_dtypes=tuple(draw(st.lists(st.sampled_from((I32, I64)), min_size=4, max_size=4))),
        padding=draw(st.integers(0, 3)),
        scattered=draw(st.booleans()),
        kv_storage=storage,
        q_storage=draw(st.sampled_from(sorted(Q_STORAGE))),
        sm_scale=draw(st.sampled_from((None, 0.0, -0.3, 0.125, 2.0))),
        seed=draw(st.integers(0, 9)),
    )


# What may go wrong with a valid problem. Each takes the problem and an integer to choose by.


def index_tensors(p: Problem) -> dict[str, torch.Tensor]:
    b = p.batch
    table = {"kv_lens": b.kv_lens} if b.is_dense else {"kv_indptr": b.kv_indptr, "last_page_len": b.last_page_len}
    return {n: x for n, x in {"qo_indptr": b.qo_indptr, "page_table": b.page_table, **table}.items() if x is not None}


def rebuilt(p: Problem, **changes: torch.Tensor | None) -> Problem:
    t = {**index_tensors(p), **changes}
    if p.batch.is_dense:
        return p.with_(batch=PagedBatch.dense(t["qo_indptr"], t["page_table"], t["kv_lens"]))
    return p.with_(batch=PagedBatch.csr(t["qo_indptr"], t["kv_indptr"], t["page_table"], t.get("last_page_len")))


def index_value(p: Problem, pick: int) -> Problem:
    """One entry of one index tensor becomes something else."""
    named = [(n, x) for n, x in index_tensors(p).items() if x.numel()]
    name, x = named[pick % len(named)]
    x = x.clone()
    values = (-1, 0, 1, 2, 3, 7, 2**31 - 1)
    x.view(-1)[pick % x.numel()] = values[pick % len(values)]
    return rebuilt(p, **{name: x})


def index_length(p: Problem, pick: int) -> Problem:
    name, x = list(index_tensors(p).items())[pick % len(index_tensors(p))]
    x = x[:-1] if pick % 2 else torch.cat([x, x[-1:]])
    return rebuilt(p, **{name: x.contiguous()})


def index_dtype(p: Problem, pick: int) -> Problem:
    name, x = list(index_tensors(p).items())[pick % len(index_tensors(p))]
    return rebuilt(p, **{name: x.to((torch.int16, torch.float32, torch.bool, torch.uint8)[pick % 4])})


def index_order(p: Problem, pick: int) -> Problem:
    name, x = list(index_tensors(p).items())[pick % len(index_tensors(p))]
    return rebuilt(p, **{name: x.flip(0)})


def fewer_rows(p: Problem, pick: int) -> Problem:
    return p.with_(q=p.q[: pick % (p.q.shape[0] + 1)])


def q_shape(p: Problem, pick: int) -> Problem:
    return p.with_(q=(p.q[..., :-1], p.q[:, :-1], p.q[0] if len(p.q) else p.q[:, 0], p.q[None], p.q[:, :0])[pick % 5])


def q_dtype(p: Problem, pick: int) -> Problem:
    return p.with_(q=p.q.to((torch.float64, torch.int32, FP16, torch.bfloat16)[pick % 4]))


def cache_shape(p: Problem, pick: int) -> Problem:
    k, v = p.kv.k_cache, p.kv.v_cache
    changes = ((k[:-1], v), (k, v[:, :-1]), (k[:, :, :-1], v[:, :, :-1]), (k, v[..., :-1]), (k[:3], v[:3]), (k[0], v))
    return p.with_(kv=PagedKV(*changes[pick % len(changes)]))


def cache_dtype(p: Problem, pick: int) -> Problem:
    other = (torch.float64, FP16, FP32, torch.int8)[pick % 4]
    k, v = p.kv.k_cache, p.kv.v_cache
    return p.with_(kv=PagedKV(k.to(other), v) if pick % 2 else PagedKV(k, v.to(other)))


def strided_last_dim(p: Problem, pick: int) -> Problem:
    def spread(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x, x], -1).flatten(-2)[..., ::2]

    k, v = p.kv.k_cache, p.kv.v_cache
    if pick % 3 == 0:
        return p.with_(q=spread(p.q))
    return p.with_(kv=PagedKV(spread(k), v) if pick % 3 == 1 else PagedKV(k, spread(v)))


def scale(p: Problem, pick: int) -> Problem:
    choices = (math.nan, math.inf, "1", True, None, 0, torch.tensor(0.5), torch.tensor(2), torch.ones(2), torch.ones(1))
    return p.with_(sm_scale=choices[pick % len(choices)])


def without_last_page_len(p: Problem, pick: int) -> Problem:
    return p if p.batch.is_dense else rebuilt(p, last_page_len=None)


def another_device(p: Problem, pick: int) -> Problem:
    if pick % 3 == 0:
        return p.with_(q=p.q.to("meta"))
    if pick % 3 == 1:
        return p.with_(kv=PagedKV(p.kv.k_cache, p.kv.v_cache.to("meta")))
    return p.with_(batch=p.batch.to("meta"))


FAULTS = (
    index_value,
    index_length,
    index_dtype,
    index_order,
    fewer_rows,
    q_shape,
    q_dtype,
    cache_shape,
    cache_dtype,
    strided_last_dim,
    scale,
    without_last_page_len,
    another_device,
)
one_fault = st.tuples(st.sampled_from(FAULTS), st.integers(0, 10**6))
faults = st.lists(one_fault, min_size=1, max_size=2, unique_by=lambda fault: fault[0].__name__)


def adapted(problem: Problem) -> Problem:
    """The spec that the tensors now imply, for the oracle."""
    from octavo.validation import spec_of

    return problem.with_(spec=spec_of(problem.q, problem.kv, problem.spec.causal))


def served(target: Target, case: Case) -> Case:
    """The case as this backend can take it, with rows and keys enough for the sm_90 kernel's tiles."""
    if target.interpreted and case.dtype == torch.bfloat16:
        return replace(case, dtype=FP16)
    if target.name != "hopper":
        return case
    dim = HOPPER_DIMS[sum(case.dims) % len(HOPPER_DIMS)]
    lengths = (tuple(7 * n for n in case.qo_lens), tuple(11 * n for n in case.kv_lens))
    return replace(case, qo_lens=lengths[0], kv_lens=lengths[1], dims=(dim, dim), dtype=FP16 if dim == 64 else BF16)


def reject_or_correct(target: Target, case: Case, wrong: list) -> None:
    case = served(target, case)
    problem = build(case, target.device)
    if wrong:
        # A wrong length or page id may be a right one that shows what was poison: then the numbers must be right too.
        problem = without_poison(problem)
    try:
        for fault, pick in wrong:
            problem = fault(problem, pick)
        result = target.attend(problem, validate=True)
    except (ValueError, TypeError) as error:
        assert MESSAGE.fullmatch(str(error)), f"no fix in the message: {error}"
        assert wrong, f"valid input was rejected: {error}"
        return
    assert_matches(adapted(problem), *result)


def examples(target: Target) -> int:
    """Few where each takes seconds: under the interpreter, and on a GPU, where each spec compiles kernels."""
    return 6 if target.interpreted else 180 if target.device == "cpu" else 40


@pytest.mark.parametrize("valid", (True, False), ids=("valid", "faulty"))
def test_attention_rejects_or_is_correct(backend, valid):
    @settings(max_examples=examples(backend), suppress_health_check=list(HealthCheck))
    @given(case=cases(), wrong=st.just([]) if valid else faults)
    def run(case, wrong):
        assume(sum(case.qo_lens) or not valid)
        reject_or_correct(backend, case, wrong)

    run()


def repeats_a_page(batch: PagedBatch) -> bool:
    """Then two tokens may have one place, and either may be there in the end."""
    if batch.device.type == "meta":
        return False
    ids = batch.page_table[batch.page_table != BAD_PAGE]
    return ids.unique().numel() < ids.numel()


def append_rejects_or_is_correct(target: Target, case: Case, wrong: list) -> None:
    problem = build(case, target.device)
    k, v = new_tokens(problem)
    overlapping = case.kv_storage == "shared heads" and case.heads[1] > 1
    try:
        for fault, pick in wrong:
            problem = fault(problem, pick)
        assume(not repeats_a_page(problem.batch) or not wrong)
        kv = problem.kv
        expected = list(copied(kv.k_cache, kv.v_cache)) if kv.v_cache.device.type != "meta" else []
        octavo.append(k, v, kv, problem.batch, validate=True)
    except (ValueError, TypeError) as error:
        assert MESSAGE.fullmatch(str(error)), f"no fix in the message: {error}"
        assert wrong or overlapping, f"valid input was rejected: {error}"
        return
    write_in_loops(problem.batch.to("cpu"), k, v, *expected)
    for got, want in zip((kv.k_cache, kv.v_cache), expected, strict=True):
        torch.testing.assert_close(storage_of(got), storage_of(want), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("valid", (True, False), ids=("valid", "faulty"))
def test_append_rejects_or_is_correct(backend, valid):
    if backend.interpreted:
        pytest.skip("the public append chooses the CPU backend here")

    @settings(max_examples=examples(backend), suppress_health_check=list(HealthCheck))
    @given(case=cases(), wrong=st.just([]) if valid else faults)
    def run(case, wrong):
        append_rejects_or_is_correct(backend, case, wrong)

    run()
