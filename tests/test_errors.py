"""Wrong inputs: ValueError or TypeError with what was expected, what came and the fix, and nothing is written."""

import math
import re

import pytest
import torch

import octavo
from octavo import AttentionSpec, BatchAttention, PagedBatch, PagedKV

MESSAGE = re.compile(r".+: expected .+, got .+; fix: .+", re.DOTALL)


def assert_says_how_to_fix(error: pytest.ExceptionInfo, name: str) -> None:
    message = str(error.value)
    assert MESSAGE.fullmatch(message), f"not 'name: expected ..., got ...; fix: ...': {message}"
    assert name in message.split("expected")[0], f"expected the message to name {name}: {message}"


def arguments(page_size: int = 2) -> dict:
    """Valid arguments of `run`: two sequences with 3 and 1 queries over 5 and 2 keys, in pages of two."""
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(9, page_size, 2, 16, generator=generator)
    return {
        "q": torch.randn(4, 4, 16, generator=generator),
        "k_cache": cache,
        "v_cache": cache.flip(0),
        "qo_indptr": torch.tensor([0, 3, 4]),
        "kv_indptr": torch.tensor([0, 3, 4]),
        "kv_indices": torch.tensor([8, 1, 5, 2]),
        "last_page_len": torch.tensor([1, 2]),
    }


def last_dim_strided(x):
    return torch.stack([x, x], -1).flatten(-2)[..., ::2]


def changed(name, function):
    """Arguments with one of them replaced by a function of itself."""
    return lambda a: {**a, name: function(a[name])}


def caches(function):
    return lambda a: {**a, "k_cache": function(a["k_cache"]), "v_cache": function(a["v_cache"])}


def given(**values):
    return lambda a: {**a, **values}


# name of the wrong input: (name in the message, change of the arguments, error)
WRONG_CALLS = {
    # q
    "q is not a tensor": ("q", given(q=[[1.0]]), TypeError),
    "q of rank 2": ("q", changed("q", lambda x: x[0]), ValueError),
    "q of rank 4": ("q", changed("q", lambda x: x[None]), ValueError),
    "q of integers": ("dtype", changed("q", lambda x: x.int()), TypeError),
    "q in float64": ("dtype", changed("q", lambda x: x.double()), TypeError),
    "q complex": ("dtype", changed("q", lambda x: x.to(torch.complex64)), TypeError),
    "q with strided last dim": ("q", changed("q", last_dim_strided), ValueError),
    "q without heads": ("num_qo_heads", changed("q", lambda x: x[:, :0]), ValueError),
    "q heads not a multiple": ("num_qo_heads", changed("q", lambda x: x[:, :3]), ValueError),
    "q of another head dim": ("k_cache", changed("q", lambda x: torch.cat([x, x], -1)), ValueError),
    "q wants a gradient": ("q", changed("q", lambda x: x.clone().requires_grad_()), ValueError),
    "q on another device": ("k_cache", changed("q", lambda x: x.to("meta")), ValueError),
    # caches
    "k_cache is not a tensor": ("k_cache", given(k_cache=None), TypeError),
    "v_cache is not a tensor": ("v_cache", given(v_cache=3), TypeError),
    "k_cache of rank 3": ("k_cache", changed("k_cache", lambda x: x[:, 0]), ValueError),
    "v_cache of rank 5": ("v_cache", changed("v_cache", lambda x: x[None]), ValueError),
    "k_cache of another dtype": ("k_cache", changed("k_cache", lambda x: x.half()), TypeError),
    "v_cache of another dtype": ("v_cache", changed("v_cache", lambda x: x.bfloat16()), TypeError),
    "k_cache strided last dim": ("k_cache", changed("k_cache", last_dim_strided), ValueError),
    "v_cache strided last dim": ("v_cache", changed("v_cache", last_dim_strided), ValueError),
    "fewer pages of v": ("v_cache", changed("v_cache", lambda x: x[:-1]), ValueError),
    "another page size of v": ("v_cache", changed("v_cache", lambda x: x[:, :1]), ValueError),
    "other heads of v": ("v_cache", changed("v_cache", lambda x: x[:, :, :1]), ValueError),
    "no K/V heads": ("num_kv_heads", caches(lambda x: x[:, :, :0]), ValueError),
    "pages of no keys": ("page_size", caches(lambda x: x[:, :0]), ValueError),
    "k_cache wants a gradient": ("k_cache", changed("k_cache", lambda x: x.clone().requires_grad_()), ValueError),
    "k_cache on another device": ("v_cache", changed("k_cache", lambda x: x.to("meta")), ValueError),
    "v_cache on another device": ("v_cache", changed("v_cache", lambda x: x.to("meta")), ValueError),
    "head dim too small": (
        "head_dim",
        lambda a: {**a, **{n: a[n][..., :8].contiguous() for n in ("q", "k_cache", "v_cache")}},
        ValueError,
    ),
    "head dim too large": (
        "head_dim",
        lambda a: {**a, **{n: a[n].repeat_interleave(17, -1) for n in ("q", "k_cache", "v_cache")}},
        ValueError,
    ),
    "value dim too small": ("value_dim", changed("v_cache", lambda x: x[..., :4].contiguous()), ValueError),
    # index tensors: shapes and dtypes
    "qo_indptr is a list": ("qo_indptr", given(qo_indptr=[0, 3, 4]), TypeError),
    "qo_indptr of floats": ("qo_indptr", changed("qo_indptr", lambda x: x.float()), TypeError),
    "kv_indptr of int16": ("kv_indptr", changed("kv_indptr", lambda x: x.short()), TypeError),
    "kv_indices of bools": ("kv_indices", changed("kv_indices", lambda x: x.bool()), TypeError),
    "last_page_len of floats": ("last_page_len", changed("last_page_len", lambda x: x.float()), TypeError),
    "qo_indptr of rank 2": ("qo_indptr", changed("qo_indptr", lambda x: x[None]), ValueError),
    "kv_indices of rank 2": ("kv_indices", changed("kv_indices", lambda x: x[None]), ValueError),
    "qo_indptr has no element": ("qo_indptr", changed("qo_indptr", lambda x: x[:0]), ValueError),
    "kv_indptr is shorter": ("kv_indptr", changed("kv_indptr", lambda x: x[:-1]), ValueError),
    "kv_indptr is longer": ("kv_indptr", given(kv_indptr=torch.tensor([0, 1, 2, 3])), ValueError),
    "last_page_len is shorter": ("last_page_len", changed("last_page_len", lambda x: x[:-1]), ValueError),
    "last_page_len is missing": ("last_page_len", given(last_page_len=None), ValueError),
    "kv_indices strided": ("kv_indices", changed("kv_indices", lambda x: x.repeat_interleave(2)[::2]), ValueError),
    "qo_indptr on another device": ("kv_ind", changed("qo_indptr", lambda x: x.to("meta")), ValueError),
    "kv_indices on another device": ("kv_indices", changed("kv_indices", lambda x: x.to("meta")), ValueError),
    # scale
    "scale is NaN": ("sm_scale", given(sm_scale=math.nan), ValueError),
    "scale is infinite": ("sm_scale", given(sm_scale=-math.inf), ValueError),
    "scale tensor is NaN": ("sm_scale", given(sm_scale=torch.tensor(math.nan)), ValueError),
    "scale is text": ("sm_scale", given(sm_scale="0.125"), TypeError),
    "scale is a bool": ("sm_scale", given(sm_scale=True), TypeError),
    "scale is complex": ("sm_scale", given(sm_scale=1j), TypeError),
    "scale of two elements": ("sm_scale", given(sm_scale=torch.ones(2)), ValueError),
    "scale of integers": ("sm_scale", given(sm_scale=torch.tensor(1)), ValueError),
    # backend
    "no such backend": ("backend", given(backend="cutlass"), ValueError),
}

WRONG_VALUES = {
    "qo_indptr does not begin at 0": ("qo_indptr", given(qo_indptr=torch.tensor([1, 3, 4])), ValueError),
    "qo_indptr falls": ("qo_indptr", given(qo_indptr=torch.tensor([0, 4, 3])), ValueError),
    "qo_indptr is negative": ("qo_indptr", given(qo_indptr=torch.tensor([0, -1, 4])), ValueError),
    "qo_indptr past q": ("qo_indptr", given(qo_indptr=torch.tensor([0, 3, 5])), ValueError),
    "kv_indptr falls": ("kv_indptr", given(kv_indptr=torch.tensor([0, 4, 3])), ValueError),
    "kv_indptr begins below 0": ("kv_indptr", given(kv_indptr=torch.tensor([-1, 3, 4])), ValueError),
    "kv_indptr past kv_indices": ("kv_indptr", given(kv_indptr=torch.tensor([0, 3, 5])), ValueError),
    "page id negative": ("kv_indices", given(kv_indices=torch.tensor([8, -1, 5, 2])), ValueError),
    "page id past the cache": ("kv_indices", given(kv_indices=torch.tensor([8, 1, 9, 2])), ValueError),
    "page id past 2^31": ("kv_indices", given(kv_indices=torch.tensor([8, 1, 2**31, 2])), ValueError),
    "last page empty": ("last_page_len", given(last_page_len=torch.tensor([0, 2])), ValueError),
    "last page overfull": ("last_page_len", given(last_page_len=torch.tensor([1, 3])), ValueError),
    "last page negative": ("last_page_len", given(last_page_len=torch.tensor([1, -2])), ValueError),
}


@pytest.mark.parametrize("wrong", [*WRONG_CALLS.values(), *WRONG_VALUES.values()], ids=[*WRONG_CALLS, *WRONG_VALUES])
def test_wrong_call_of_run(wrong):
    name, change, error = wrong
    call = change(arguments())
    with pytest.raises(error) as caught:
        octavo.run(**call)
    assert_says_how_to_fix(caught, name)


def test_the_unchanged_call_is_right():
    out, lse = octavo.run(**arguments())
    assert out.isfinite().all() and lse.isfinite().all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a CUDA device the Triton backend serves CPU tensors too")
def test_gpu_backend_without_a_gpu_says_why(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=r"backend: .*triton: .*CPU.*; fix: "):
        octavo.run(**arguments(), backend="triton")


DENSE = {"block_table": torch.tensor([[8, 1, 5], [2, -7, -7]]), "kv_lens": torch.tensor([5, 2])}

WRONG_DENSE = {
    "kv_lens past the table": ("kv_lens", {"kv_lens": torch.tensor([7, 2])}, ValueError),
    "kv_lens negative": ("kv_lens", {"kv_lens": torch.tensor([5, -1])}, ValueError),
    "kv_lens of floats": ("kv_lens", {"kv_lens": torch.tensor([5.0, 2.0])}, TypeError),
    "kv_lens longer": ("kv_lens", {"kv_lens": torch.tensor([5, 2, 1])}, ValueError),
    "table of rank 1": ("block_table", {"block_table": torch.tensor([8, 1])}, ValueError),
    "table with fewer rows": ("block_table", {"block_table": torch.tensor([[8, 1, 5]])}, ValueError),
    "table of floats": ("block_table", {"block_table": torch.ones(2, 3)}, TypeError),
    "table transposed": ("block_table", {"block_table": torch.tensor([[8, 2], [1, 0], [5, 0]]).T}, ValueError),
    "used page id negative": ("block_table", {"kv_lens": torch.tensor([5, 3])}, ValueError),
    "used page id past the cache": ("block_table", {"block_table": torch.tensor([[8, 1, 9], [2, 0, 0]])}, ValueError),
    "kv_lens on another device": ("kv_lens", {"kv_lens": torch.tensor([5, 2], device="meta")}, ValueError),
}


@pytest.mark.parametrize("wrong", WRONG_DENSE.values(), ids=WRONG_DENSE)
def test_wrong_dense_batch(wrong):
    name, change, error = wrong
    a, tables = arguments(), {**DENSE, **change}
    with pytest.raises(error) as caught:
        octavo.attend(
            a["q"],
            PagedKV(a["k_cache"], a["v_cache"]),
            PagedBatch.dense(a["qo_indptr"], tables["block_table"], tables["kv_lens"]),
        )
    assert_says_how_to_fix(caught, name)


def test_the_unchanged_dense_batch_is_right():
    a = arguments()
    kv = PagedKV(a["k_cache"], a["v_cache"])
    dense = octavo.attend(a["q"], kv, PagedBatch.dense(a["qo_indptr"], **DENSE))
    csr = octavo.run(**a)
    assert torch.equal(dense[0], csr[0]) and torch.equal(dense[1], csr[1])


WRONG_SPECS = {
    "heads are text": ("num_qo_heads", {"num_qo_heads": "8"}, TypeError),
    "heads are a bool": ("num_kv_heads", {"num_kv_heads": True}, TypeError),
    "no heads": ("num_kv_heads", {"num_kv_heads": 0}, ValueError),
    "heads do not divide": ("num_qo_heads", {"num_qo_heads": 9}, ValueError),
    "fewer query heads": ("num_qo_heads", {"num_qo_heads": 2}, ValueError),
    "page_size 0": ("page_size", {"page_size": 0}, ValueError),
    "page_size of float": ("page_size", {"page_size": 16.0}, TypeError),
    "head_dim 8": ("head_dim", {"head_dim": 8}, ValueError),
    "head_dim 512": ("head_dim", {"head_dim": 512}, ValueError),
    "value_dim 512": ("value_dim", {"value_dim": 512}, ValueError),
    "dtype is text": ("dtype", {"dtype": "bfloat16"}, TypeError),
    "dtype float64": ("dtype", {"dtype": torch.float64}, TypeError),
    "causal is text": ("causal", {"causal": "yes"}, TypeError),
}


@pytest.mark.parametrize("wrong", WRONG_SPECS.values(), ids=WRONG_SPECS)
def test_wrong_spec(wrong):
    name, change, error = wrong
    with pytest.raises(error) as caught:
        AttentionSpec(**{"num_qo_heads": 8, "num_kv_heads": 4, "head_dim": 64, **change})
    assert_says_how_to_fix(caught, name)


CACHE = torch.zeros(3, 4, 2, 32)

WRONG_CACHES = {
    "no such layout": ("layout", lambda: PagedKV(CACHE, CACHE, layout="NDH"), ValueError),
    "rank": ("k_cache", lambda: PagedKV(CACHE[0], CACHE), ValueError),
    "not a tensor": ("v_cache", lambda: PagedKV(CACHE, [1]), TypeError),
    "combined of rank 4": ("cache", lambda: PagedKV.combined(CACHE), ValueError),
    "combined with three parts": ("cache", lambda: PagedKV.combined(torch.zeros(3, 3, 4, 2, 32)), ValueError),
    "combined layout": ("layout", lambda: PagedKV.combined(torch.zeros(3, 2, 4, 2, 32), layout="nhd"), ValueError),
    "packed head_dim 0": ("head_dim", lambda: PagedKV.packed(CACHE, 0), ValueError),
    "packed without values": ("head_dim", lambda: PagedKV.packed(CACHE, 32), ValueError),
    "packed of rank 5": ("cache", lambda: PagedKV.packed(CACHE[None], 16), ValueError),
}


@pytest.mark.parametrize("wrong", WRONG_CACHES.values(), ids=WRONG_CACHES)
def test_wrong_cache(wrong):
    name, make, error = wrong
    with pytest.raises(error) as caught:
        make()
    assert_says_how_to_fix(caught, name)


# Plans and buffers


def planned(**bounds):
    a = arguments()
    spec = AttentionSpec(4, 2, 16, page_size=2, dtype=torch.float32)
    batch = PagedBatch.csr(a["qo_indptr"], a["kv_indptr"], a["kv_indices"], a["last_page_len"])
    attention = BatchAttention(spec, device="cpu", **bounds)
    attention.plan(batch)
    return attention, a["q"], PagedKV(a["k_cache"], a["v_cache"]), batch


def buffers(rows=4, heads=4, dim=16, dtype=torch.float32):
    return torch.full((rows, heads, dim), 7.0, dtype=dtype), torch.full((rows, heads), 7.0)


OUT, LSE = buffers()

WRONG_BUFFERS = {
    "out alone": ("out and lse", (OUT, None), ValueError),
    "lse alone": ("out and lse", (None, LSE), ValueError),
    "out too short": ("out", (OUT[:-1], LSE), ValueError),
    "out too long": ("out", (torch.cat([OUT, OUT]), LSE), ValueError),
    "out of another dim": ("out", (OUT[..., :8].contiguous(), LSE), ValueError),
    "out of another dtype": ("out", (OUT.half(), LSE), TypeError),
    "out strided last dim": ("out", (last_dim_strided(OUT), LSE), ValueError),
    "out on another device": ("out", (OUT.to("meta"), LSE), ValueError),
    "out overlaps itself": ("out", (OUT[:1].expand(4, 4, 16), LSE), ValueError),
    "lse too short": ("lse", (OUT, LSE[:-1]), ValueError),
    "lse in float64": ("lse", (OUT, LSE.double()), TypeError),
    "lse on another device": ("lse", (OUT, LSE.to("meta")), ValueError),
    "lse overlaps itself": ("lse", (OUT, LSE[:1].expand(4, 4)), ValueError),
}


@pytest.mark.parametrize("wrong", WRONG_BUFFERS.values(), ids=WRONG_BUFFERS)
def test_wrong_buffers(wrong):
    name, (out, lse), error = wrong
    attention, q, kv, _ = planned()
    with pytest.raises(error) as caught:
        attention.run(q, kv, out=out, lse=lse)
    assert_says_how_to_fix(caught, name)
    assert (OUT == 7).all() and (LSE == 7).all()


def cache_of(kv, function):
    return PagedKV(function(kv.k_cache), function(kv.v_cache))


WRONG_RUNS = {
    "q of other heads": ("q", lambda q, kv: (q[:, :2], kv), ValueError),
    "q of another dtype": ("q", lambda q, kv: (q.half(), kv), TypeError),
    "more rows than planned": ("q", lambda q, kv: (torch.cat([q, q]), kv), ValueError),
    "fewer rows than the batch": ("qo_indptr", lambda q, kv: (q[:3], kv), ValueError),
    "another page size": ("k_cache", lambda q, kv: (q, cache_of(kv, lambda x: x[:, :1])), ValueError),
    "another dtype of the cache": ("k_cache", lambda q, kv: (q, cache_of(kv, torch.Tensor.half)), TypeError),
    "fewer pages than page ids": ("kv_indices", lambda q, kv: (q, cache_of(kv, lambda x: x[:8])), ValueError),
}


@pytest.mark.parametrize("wrong", WRONG_RUNS.values(), ids=WRONG_RUNS)
def test_wrong_run_of_a_plan_writes_nothing(wrong):
    name, change, error = wrong
    attention, q, kv, _ = planned()
    q, kv = change(q, kv)
    out, lse = buffers(q.shape[0], q.shape[1], dtype=q.dtype)
    before = [x.clone() for x in (q, kv.k_cache, kv.v_cache)]
    with pytest.raises(error) as caught:
        attention.run(q, kv, out=out, lse=lse)
    assert_says_how_to_fix(caught, name)
    assert (out == 7).all() and (lse == 7).all()
    assert all(torch.equal(x, y) for x, y in zip((q, kv.k_cache, kv.v_cache), before, strict=True))


def test_run_before_plan():
    attention = BatchAttention(AttentionSpec(4, 2, 16, page_size=2, dtype=torch.float32), device="cpu")
    _, q, kv, _ = planned()
    with pytest.raises(RuntimeError) as caught:
        attention.run(q, kv)
    assert MESSAGE.fullmatch(str(caught.value))


def test_plan_past_its_bounds():
    for bounds, name in (({"max_tokens": 3}, "num_tokens"), ({"max_sequences": 1}, "batch")):
        attention = BatchAttention(AttentionSpec(4, 2, 16, page_size=2, dtype=torch.float32), device="cpu", **bounds)
        _, _, _, batch = planned()
        with pytest.raises(ValueError) as caught:
            attention.plan(batch, num_tokens=4)
        assert_says_how_to_fix(caught, name)


def test_plan_on_another_device():
    attention, _, _, batch = planned()
    with pytest.raises(ValueError) as caught:
        attention.plan(batch.to("meta"))
    assert_says_how_to_fix(caught, "qo_indptr")


# append


def append_arguments() -> dict:
    a = arguments()
    generator = torch.Generator().manual_seed(1)
    return {
        "k": torch.randn(4, 2, 16, generator=generator),
        "v": torch.randn(4, 2, 16, generator=generator),
        "kv": PagedKV(a["k_cache"], a["v_cache"]),
        "batch": PagedBatch.csr(a["qo_indptr"], a["kv_indptr"], a["kv_indices"], a["last_page_len"]),
    }


def with_batch(**fields):
    def change(a):
        names = ("qo_indptr", "kv_indptr", "kv_indices", "last_page_len")
        return {**a, "batch": PagedBatch.csr(*(({**arguments(), **fields})[n] for n in names))}

    return change


WRONG_APPENDS = {
    "k is not a tensor": ("k", given(k=1), TypeError),
    "k of rank 2": ("k", changed("k", lambda x: x[0]), ValueError),
    "k of other heads": ("k", changed("k", lambda x: x[:, :1]), ValueError),
    "k of another dim": ("k", changed("k", lambda x: x[..., :8].contiguous()), ValueError),
    "k of another dtype": ("k", changed("k", lambda x: x.half()), TypeError),
    "k strided last dim": ("k", changed("k", last_dim_strided), ValueError),
    "k on another device": ("k", changed("k", lambda x: x.to("meta")), ValueError),
    "k wants a gradient": ("k", changed("k", lambda x: x.clone().requires_grad_()), ValueError),
    "v shorter than k": ("v", changed("v", lambda x: x[:-1]), ValueError),
    "v of another dtype": ("v", changed("v", lambda x: x.double()), TypeError),
    "last_page_len is missing": ("last_page_len", with_batch(last_page_len=None), ValueError),
    "more tokens than rows": ("qo_indptr", with_batch(qo_indptr=torch.tensor([0, 3, 5])), ValueError),
    "qo_indptr falls": ("qo_indptr", with_batch(qo_indptr=torch.tensor([0, 4, 3])), ValueError),
    "page id past the cache": ("kv_indices", with_batch(kv_indices=torch.tensor([8, 1, 9, 2])), ValueError),
    "page id negative": ("kv_indices", with_batch(kv_indices=torch.tensor([8, -1, 5, 2])), ValueError),
    "cache of overlapping heads": (
        "k_cache",
        lambda a: {**a, "kv": PagedKV(a["kv"].k_cache[:, :, :1].expand(9, 2, 2, 16), a["kv"].v_cache)},
        ValueError,
    ),
}


@pytest.mark.parametrize("wrong", WRONG_APPENDS.values(), ids=WRONG_APPENDS)
def test_wrong_append_writes_nothing(wrong):
    name, change, error = wrong
    call = change(append_arguments())
    before = call["kv"].k_cache.clone(), call["kv"].v_cache.clone()
    with pytest.raises(error) as caught:
        octavo.append(**call)
    assert_says_how_to_fix(caught, name)
    assert torch.equal(call["kv"].k_cache, before[0]) and torch.equal(call["kv"].v_cache, before[1])


# merge

WRONG_MERGES = {
    "no states": ("states", [], ValueError),
    "a state is a tensor": ("states[0]", [OUT], TypeError),
    "a state of three": ("states[1]", [(OUT, LSE), (OUT, LSE, LSE)], TypeError),
    "out of rank 2": ("states[0] out", [(OUT[0], LSE)], ValueError),
    "other rows": ("states[1] out", [(OUT, LSE), (OUT[:2], LSE[:2])], ValueError),
    "other dims": ("states[1] out", [(OUT, LSE), (OUT[..., :8].contiguous(), LSE)], ValueError),
    "lse of other rows": ("states[0] lse", [(OUT, LSE[:2])], ValueError),
    "lse with a last dim": ("states[0] lse", [(OUT, LSE[..., None])], ValueError),
    "other dtypes": ("states[1] out", [(OUT, LSE), (OUT.half(), LSE)], TypeError),
    "lse in float16": ("states[0] lse", [(OUT, LSE.half())], TypeError),
    "out of integers": ("states[0] out", [(OUT.int(), LSE)], TypeError),
    "other devices": ("states[1] out", [(OUT, LSE), (OUT.to("meta"), LSE)], ValueError),
    "lse on another device": ("states[0] lse", [(OUT, LSE.to("meta"))], ValueError),
    "wants a gradient": ("out", [(OUT.clone().requires_grad_(), LSE)], ValueError),
}


@pytest.mark.parametrize("wrong", WRONG_MERGES.values(), ids=WRONG_MERGES)
def test_wrong_merge(wrong):
    name, states, error = wrong
    with pytest.raises(error) as caught:
        octavo.merge(states)
    assert_says_how_to_fix(caught, name)
