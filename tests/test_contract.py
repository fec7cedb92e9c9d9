"""Every backend against the oracle, one axis of the contract at a time."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from inputs import BF16, FP16, FP32, I32, I64, KV_STORAGE, Q_STORAGE, Case, indptr
from tolerance import assert_matches

from octavo import PagedBatch, PagedKV

DTYPES = {"bf16": BF16, "fp16": FP16, "fp32": FP32}
DIMS = ((16, 16), (40, 40), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (64, 256))


def cases(*axes: str, **values: tuple) -> list[pytest.param]:
    """One parameter per combination of field values, named by them."""
    found = []
    for combination in itertools.product(*values.values()):
        fields = dict(zip(values, combination, strict=True))
        name = " ".join(f"{k}={str(v).removeprefix('torch.')}" for k, v in fields.items())
        found.append(pytest.param(Case(name, **fields), id=name.replace(" ", "-")))
    return found


def check(backend, case, **options):
    problem = backend.build(case)
    out, lse = backend.attend(problem, **options)
    assert_matches(problem, out, lse)
    return problem


@pytest.mark.parametrize("case", cases(page_size=(1, 2, 3, 5, 16, 64, 128), causal=(True, False), dense=(False, True)))
def test_page_sizes(backend, case):
    check(backend, case)


@pytest.mark.parametrize("case", cases(kv_lens=((1, 0, 2, 200), (127, 128, 129, 300)), page_size=(1, 16, 128)))
def test_pages_partly_full(backend, case):
    check(backend, case)


@pytest.mark.parametrize(
    "case", cases(page_size=(1, 3, 16, 33), dims=((64, 64), (40, 64), (64, 48)), causal=(True, False))
)
def test_consecutive_pages(backend, case):
    """Pages that lie in a row, as a fresh cache gives them, may be read as one."""
    check(backend, replace(case, scattered=False))


@pytest.mark.parametrize("storage", KV_STORAGE)
def test_consecutive_pages_of_any_storage(backend, storage):
    check(backend, Case("storage", scattered=False, page_size=4, kv_storage=storage, heads=(6, 3)))


@pytest.mark.parametrize("group", (1, 2, 3, 5, 7, 8, 9, 16, 64, 71))
@pytest.mark.parametrize("kv_heads", (1, 3))
@pytest.mark.parametrize("causal", (True, False), ids=("causal", "full"))
def test_group_sizes(backend, group, kv_heads, causal):
    check(backend, Case("group", (3, 1, 9), (9, 40, 9), (group * kv_heads, kv_heads), causal=causal, dtype=FP16))


@pytest.mark.parametrize("case", cases(dims=DIMS, dtype=(BF16, FP16, FP32), causal=(True, False)))
def test_head_dims(backend, case):
    check(backend, replace(case, page_size=3, heads=(6, 2)))


MIXED_INDICES = [(I32,) * 4, (I64,) * 4, (I64, I32, I32, I32), (I32, I64, I32, I64), (I32, I32, I64, I32)]


@pytest.mark.parametrize("index_dtypes", MIXED_INDICES)
@pytest.mark.parametrize("dense", (False, True), ids=("csr", "dense"))
def test_index_dtypes(backend, index_dtypes, dense):
    check(backend, Case("indices", page_size=3, dense=dense, index_dtypes=index_dtypes, dims=(16, 16)))


@pytest.mark.parametrize("storage", KV_STORAGE)
@pytest.mark.parametrize("page_size", (1, 4))
def test_kv_storage(backend, storage, page_size):
    check(backend, Case("storage", page_size=page_size, kv_storage=storage, heads=(6, 3)))


@pytest.mark.parametrize("storage", Q_STORAGE)
def test_q_storage(backend, storage):
    # Expanded rows would all be NaN if the padding rows were the ones repeated; they are not: row 0 is.
    check(backend, Case("storage", q_storage=storage, dtype=FP16))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_unaligned_everything(backend, dtype):
    check(backend, Case("odd", kv_storage="unaligned", q_storage="unaligned", page_size=3, dims=(80, 80), dtype=dtype))


def test_block_table_is_a_view_of_a_wider_one(backend):
    problem = backend.build(Case("view", page_size=4, dense=True))
    table = problem.batch.page_table
    wide = torch.full((table.shape[0], table.shape[1] + 9), 2**30, dtype=table.dtype, device=table.device)
    view = wide[:, 3 : 3 + table.shape[1]].copy_(table)
    assert not view.is_contiguous()
    problem = problem.with_(batch=PagedBatch.dense(problem.batch.qo_indptr, view, problem.batch.kv_lens))
    assert_matches(problem, *backend.attend(problem))


def test_kv_indptr_may_begin_past_zero(backend):
    """A slice of a larger batch: what precedes its first offset is never read."""
    problem = backend.build(Case("slice", page_size=2))
    b = problem.batch
    before = torch.full((5,), 2**30, dtype=b.page_table.dtype, device=b.device)
    batch = PagedBatch.csr(b.qo_indptr, b.kv_indptr + 5, torch.cat([before, b.page_table]), b.last_page_len)
    expected, _ = backend.attend(problem)
    problem = problem.with_(batch=batch)
    out, lse = backend.attend(problem)
    assert_matches(problem, out, lse)
    assert torch.equal(out[:-2], expected[:-2])


DEAD = {
    "more queries than keys": Case("dead", (34, 70, 30), (1, 2, 29), heads=(8, 1)),
    "first rows of a tile": Case("dead", (40,), (33,), heads=(8, 2), dims=(16, 16)),
    "no keys in one sequence": Case("dead", (5, 3, 4), (9, 0, 6)),
    "no keys at all": Case("dead", (5, 3), (0, 0)),
    "no keys, not causal": Case("dead", (5, 3, 2), (0, 4, 0), causal=False),
    "no keys, pages of 16": Case("dead", (5, 3, 20), (0, 4, 17), page_size=16),
    "no keys, dense": Case("dead", (5, 3, 20), (0, 4, 17), page_size=16, dense=True),
    "zero queries here and there": Case("dead", (0, 4, 0, 0, 7, 1, 0), (9, 4, 0, 33, 20, 1, 5)),
    "zero queries only": Case("dead", (0, 0), (3, 0)),
    "padding rows only": Case("dead", (0, 0), (3, 0), padding=7),
    "many padding rows": Case("dead", (1,), (3,), padding=300, dims=(16, 16)),
    "padding in pages": Case("dead", (1, 6), (3, 9), padding=5, page_size=4, dense=True),
    "thousands of dead rows": Case("dead", (3000,), (1,), heads=(32, 4), dims=(128, 128), padding=0),
}


@pytest.mark.parametrize("case", DEAD.values(), ids=[name.replace(" ", "-") for name in DEAD])
def test_rows_that_see_no_key(backend, case):
    check(backend, case)


@pytest.mark.parametrize("dense", (False, True), ids=("csr", "dense"))
@pytest.mark.parametrize("padding", (0, 3))
def test_empty_batch(backend, dense, padding):
    problem = backend.build(Case("empty", (), (), padding=padding, dense=dense))
    out, lse = backend.attend(problem)
    assert out.shape == (padding, 4, 64) and lse.shape == (padding, 4)
    assert_matches(problem, out, lse)


def test_cache_without_pages(backend):
    problem = backend.build(Case("no pages", (4,), (0,)))
    nothing = problem.kv.k_cache[:0]
    problem = problem.with_(kv=PagedKV(nothing, nothing))
    assert_matches(problem, *backend.attend(problem))


def test_single_key_is_copied(backend):
    problem = check(backend, Case("one key", (1,), (1,), padding=0))
    out, _ = backend.attend(problem)
    value = problem.kv.v_cache[problem.batch.page_table[0], 0]
    assert torch.equal(out[0], value.repeat_interleave(problem.spec.group_size, 0))


SCALES = {
    "default": None,
    "negative": -0.125,
    "zero": 0.0,
    "large": 4.0,
    "integer": 1,
    "tensor": torch.tensor(0.07),
    "float64 tensor": torch.tensor(0.07, dtype=torch.float64),
    "one element": torch.tensor([-0.2]),
}


@pytest.mark.parametrize("scale", SCALES.values(), ids=[name.replace(" ", "-") for name in SCALES])
@pytest.mark.parametrize("causal", (True, False), ids=("causal", "full"))
def test_scales(backend, scale, causal):
    problem = backend.build(Case("scale", causal=causal, dtype=FP16, page_size=2)).with_(sm_scale=scale)
    assert_matches(problem, *backend.attend(problem))


def test_scale_is_a_tensor_on_the_device(backend):
    problem = backend.build(Case("scale")).with_(sm_scale=torch.tensor(-0.07, device=backend.device))
    assert_matches(problem, *backend.attend(problem))


@pytest.mark.parametrize("scale", (None, -0.125, 0.0))
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_huge_logits(backend, scale, dtype):
    """Scaled logits in the thousands: exp2 only after the maximum is taken off."""
    check(backend, Case("huge", (5, 40), (66, 40), gain=30.0, dtype=dtype, sm_scale=scale))


def test_logits_very_negative(backend):
    """Finite, however low: an ordinary softmax."""
    problem = backend.build(Case("low", (1, 9, 1), (1, 70, 64), dims=(128, 128)))
    problem.q.fill_(448.0)
    keys = problem.batch.page_table[:135].long()
    steps = torch.arange(135, device=problem.q.device) % 7 / 8
    problem.kv.k_cache[keys] = (-(3.5 + steps)).to(problem.q.dtype)[:, None, None, None]
    assert_matches(problem, *backend.attend(problem))


def test_repeated_and_shared_pages(backend):
    problem = backend.build(Case("shared", (4, 4, 2), (24, 24, 6), page_size=2))
    ids = problem.batch.page_table
    ids[12:20] = ids[:8]
    ids[:12] = ids[:12].flip(0).clone()
    ids[24:27] = ids[0]
    assert_matches(problem, *backend.attend(problem))


def test_other_sequences_do_not_matter(backend):
    """NaN and Inf in a neighbour's keys and queries stay there."""
    problem = backend.build(Case("neighbour", (3, 2, 4), (20, 9, 14), page_size=1))
    expected, expected_lse = backend.attend(problem)
    neighbour = problem.batch.page_table[20:29].long()
    problem.kv.k_cache[neighbour] = math.nan
    problem.kv.v_cache[neighbour] = math.inf
    problem.q[3:5] = math.nan
    out, lse = backend.attend(problem)
    for got, want in ((out, expected), (lse, expected_lse)):
        assert torch.equal(got[:3], want[:3]) and torch.equal(got[5:], want[5:])


@pytest.mark.parametrize("shape", ("long prefix", "many short", "one long row"))
def test_longer_batches(backend, shape):
    if backend.interpreted:
        pytest.skip("slow under Triton's interpreter")
    lengths = {
        "long prefix": ((1, 257, 64), (2049, 700, 1500)),
        "many short": (tuple(range(1, 40)), tuple(range(3, 81, 2))),
        "one long row": ((1, 1), (5000, 1)),
    }
    check(backend, Case(shape, *lengths[shape], heads=(8, 2), page_size=16))


@pytest.mark.parametrize("case", (DEAD["zero queries here and there"], Case("odd", page_size=5, heads=(7, 1))), ids=str)
def test_calls_repeat_bitwise(backend, case):
    problem = backend.build(case)
    first, second = backend.attend(problem), backend.attend(problem)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


def test_inputs_are_left_alone(backend):
    problem = backend.build(Case("inputs", page_size=4, padding=0))
    tensors = [problem.q, problem.kv.k_cache, problem.kv.v_cache, *problem.batch.tensors().values()]
    before = [x.clone() for x in tensors]
    backend.attend(problem)
    for x, y in zip(tensors, before, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


# Plans


OUT_STORAGE = {
    "contiguous": lambda x: x,
    "head major": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "in a wider buffer": lambda x: x.new_full((x.shape[0], 2 * x.shape[1], *x.shape[2:]), math.nan)[:, 1::2],
}


@pytest.mark.parametrize("storage", OUT_STORAGE.values(), ids=[name.replace(" ", "-") for name in OUT_STORAGE])
@pytest.mark.parametrize("case", [*DEAD.values(), Case("ragged", page_size=3)], ids=[*DEAD, "ragged"])
def test_outputs_are_written_completely(backend, case, storage):
    """Buffers of the caller, full of NaN before."""
    problem = backend.build(case)
    shape = (*problem.q.shape[:2], problem.spec.v_dim)
    out = storage(torch.full(shape, math.nan, dtype=problem.q.dtype, device=backend.device))
    lse = storage(torch.full(shape[:2], math.nan, device=backend.device))
    got = backend.plan(problem).run(problem.q, problem.kv, sm_scale=problem.sm_scale, out=out, lse=lse)
    assert got[0] is out and got[1] is lse
    assert_matches(problem, out, lse)


def test_nothing_is_written_outside_outputs(backend):
    problem = backend.build(Case("edges", padding=0))
    rows = problem.q.shape[0]
    big = torch.full((rows + 8, 12, 66), 7.0, dtype=problem.q.dtype, device=backend.device)
    big_lse = torch.full((rows + 8, 12), 7.0, device=backend.device)
    out, lse = big[4:-4, 4:8, 1:65], big_lse[4:-4, 4:8]
    backend.plan(problem).run(problem.q, problem.kv, out=out, lse=lse)
    assert_matches(problem, out, lse)
    out.fill_(7.0)
    lse.fill_(7.0)
    assert (big == 7).all() and (big_lse == 7).all()


@pytest.mark.parametrize("bounds", ({}, {"max_tokens": 64}, {"max_tokens": 300, "max_sequences": 9}), ids=str)
@pytest.mark.parametrize("dense", (False, True), ids=("csr", "dense"))
def test_one_plan_serves_many_layers(backend, bounds, dense):
    problem = backend.build(Case("layers", page_size=4, dense=dense))
    attention = backend.plan(problem, **bounds)
    for seed, scale in enumerate((None, 0.3, torch.tensor(-0.1))):
        other = backend.build(Case("layers", page_size=4, dense=dense))
        generator = torch.Generator().manual_seed(seed)
        layer = problem.with_(q=torch.randn(other.q.shape, generator=generator).to(other.q), sm_scale=scale)
        assert_matches(layer, *attention.run(layer.q, layer.kv, sm_scale=scale))


def test_plan_serves_other_strides(backend):
    problem = backend.build(Case("strides", page_size=4))
    attention = backend.plan(problem)
    for storage in ("nhd", "hnd", "unaligned", "all layers"):
        layer = backend.build(Case("strides", page_size=4, kv_storage=storage))
        assert_matches(layer, *attention.run(layer.q, layer.kv))


def test_replanning_for_smaller_and_larger_batches(backend):
    sizes = [((3, 1), (9, 40)), ((2,), (2,)), ((0, 0, 0), (4, 0, 1)), ((17, 1, 1, 1, 9), (20, 5, 5, 0, 30))]
    attention = None
    for qo_lens, kv_lens in sizes:
        problem = backend.build(Case("replan", qo_lens, kv_lens, page_size=2))
        if attention is None:
            attention = backend.plan(problem)
        else:
            attention.plan(problem.batch, num_tokens=problem.q.shape[0])
        assert_matches(problem, *attention.run(problem.q, problem.kv))


def test_fewer_rows_than_planned(backend):
    problem = backend.build(Case("fewer", padding=0))
    attention = backend.plan(problem, max_tokens=200, max_sequences=8)
    attention.plan(problem.batch, num_tokens=150)
    assert_matches(problem, *attention.run(problem.q, problem.kv))
    padded = torch.cat([problem.q, torch.full_like(problem.q[:9], math.nan)])
    problem = problem.with_(q=padded)
    assert_matches(problem, *attention.run(problem.q, problem.kv))


def test_failed_plan_leaves_the_old_one_usable(backend):
    problem = backend.build(Case("old plan", page_size=4))
    attention = backend.plan(problem, max_tokens=40, max_sequences=4)
    b = problem.batch
    too_many = PagedBatch.csr(*(indptr([1] * 5).to(b.device),) * 2, b.page_table, b.page_table.new_ones(5))
    without_last = PagedBatch.csr(b.qo_indptr, b.kv_indptr, b.page_table)
    falling = PagedBatch.csr(b.qo_indptr.flip(0).contiguous(), b.kv_indptr, b.page_table, b.last_page_len)
    for bad, tokens in ((too_many, 5), (without_last, 20), (b, 41), (falling, 20)):
        with pytest.raises(ValueError):
            attention.plan(bad, num_tokens=tokens, validate=True)
        assert_matches(problem, *attention.run(problem.q, problem.kv))


def test_plan_agrees_with_single_call(backend):
    problem = backend.build(Case("agree", page_size=2, dtype=FP32))
    planned = backend.plan(problem).run(problem.q, problem.kv)
    single = backend.attend(problem)
    for a, b in zip(planned, single, strict=True):
        torch.testing.assert_close(a, b)


def test_explain_names_the_backend(backend):
    problem = backend.build(Case("explain"))
    text = backend.plan(problem).explain()
    assert backend.name in text and "AttentionSpec" in text and "PagedBatch" in text
