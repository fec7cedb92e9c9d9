"""append against plain loops, merge against the oracle, on every backend."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from inputs import BF16, FP16, FP32, I64, KV_STORAGE, Case, append_in_loops, new_tokens, storage_of
from tolerance import assert_matches

from octavo import PagedBatch
from octavo.bench.verify import LOG2_ROUNDING
from octavo.reference import merge_reference, reference

# append


def check_append(backend, case):
    problem = backend.build(case)
    k, v = new_tokens(problem)
    expected = append_in_loops(problem, k, v)
    backend.append(k, v, problem.kv, problem.batch)
    for got, want in zip((problem.kv.k_cache, problem.kv.v_cache), expected, strict=True):
        torch.testing.assert_close(storage_of(got), storage_of(want), rtol=0, atol=0, equal_nan=True)
    assert_matches(problem, *backend.attend(problem))


@pytest.mark.parametrize("page_size", (1, 2, 3, 5, 16, 64))
@pytest.mark.parametrize("dense", (False, True), ids=("csr", "dense"))
def test_append_page_sizes(backend, page_size, dense):
    check_append(backend, Case("pages", page_size=page_size, dense=dense))


@pytest.mark.parametrize("storage", [name for name in KV_STORAGE if name != "shared heads"])
def test_append_storage(backend, storage):
    check_append(backend, Case("storage", page_size=4, kv_storage=storage, dtype=FP16))


@pytest.mark.parametrize("dtype", (BF16, FP16, FP32), ids=str)
@pytest.mark.parametrize("dims", ((16, 16), (80, 80), (192, 128), (64, 256)), ids=str)
def test_append_dims(backend, dtype, dims):
    check_append(backend, Case("dims", page_size=3, dims=dims, dtype=dtype, heads=(3, 3), index_dtypes=(I64,) * 4))


TAILS = {
    "negative positions": Case("append", (7, 3, 5), (4, 3, 0), page_size=2),
    "negative positions, dense": Case("append", (7, 3, 5), (4, 3, 0), page_size=2, dense=True),
    "decode": Case("append", (1,) * 6, (1, 2, 3, 9, 64, 65), page_size=16),
    "nothing new": Case("append", (0, 0), (4, 9), page_size=4, padding=3),
    "no sequences": Case("append", (), (), padding=2),
    "no rows": Case("append", (0,), (0,), padding=0),
    "a whole prompt": Case("append", (50,), (50,), page_size=16),
}


@pytest.mark.parametrize("case", TAILS.values(), ids=[name.replace(" ", "-") for name in TAILS])
def test_append_positions(backend, case):
    check_append(backend, case)


def test_append_takes_strided_tokens(backend):
    """k and v are slices of a fused qkv projection."""
    problem = backend.build(Case("fused", page_size=4))
    k, v = new_tokens(problem)
    fused = torch.full((k.shape[0], 4 + 2 + 2, 64), math.nan, dtype=k.dtype, device=k.device)
    fused[:, 4:6], fused[:, 6:] = k, v
    expected = append_in_loops(problem, k, v)
    backend.append(fused[:, 4:6], fused[:, 6:], problem.kv, problem.batch)
    torch.testing.assert_close(problem.kv.k_cache, expected[0], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(problem.kv.v_cache, expected[1], rtol=0, atol=0, equal_nan=True)


def test_tokens_appended_one_by_one_are_a_prompt(backend):
    """Decoding five steps leaves the cache that one prefill of five tokens leaves."""
    case = Case("steps", (5,), (9,), page_size=2, padding=0)
    problem = backend.build(case)
    k, v = new_tokens(problem)
    expected = append_in_loops(problem, k, v)
    b = problem.batch
    for step in range(5):
        kv_len = 5 + step
        pages, last = -(-kv_len // 2), (kv_len - 1) % 2 + 1
        one = [torch.tensor(x, device=b.device) for x in ([0, 1], [0, pages], [last])]
        backend.append(
            k[step : step + 1], v[step : step + 1], problem.kv, PagedBatch.csr(one[0], one[1], b.page_table, one[2])
        )
    torch.testing.assert_close(problem.kv.k_cache, expected[0], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(problem.kv.v_cache, expected[1], rtol=0, atol=0, equal_nan=True)


# merge


def states_of(count, shape, dtype, device, seed=0, empty=0.3):
    """Random states, some rows of which are empty; the out of an empty row is NaN, which must not matter."""
    generator = torch.Generator().manual_seed(seed)
    states = []
    for _ in range(count):
        out = torch.randn(*shape, generator=generator)
        lse = torch.randn(*shape[:2], generator=generator) * 20
        hollow = torch.rand(*shape[:2], generator=generator) < empty
        out[hollow], lse[hollow] = math.nan, -math.inf
        states.append((out.to(device, dtype), lse.to(device)))
    return states


def merge_limits(outs, lses, exact_out, exact_lse):
    """The tolerance rule for merge: twice the error of plain PyTorch in float32, plus one rounding of each result."""
    s = torch.stack([x.cpu() for x in lses])
    mixed = torch.stack([o.cpu().float() for o in outs]).masked_fill((s == -math.inf)[..., None], 0)
    ln2 = math.log(2)
    peer_lse = torch.logsumexp(s * ln2, 0) / ln2
    weights = torch.where(s == -math.inf, 0, torch.exp2(s - torch.where(peer_lse == -math.inf, 0, peer_lse)))
    peer_out = (weights[..., None] * mixed).sum(0).to(outs[0].dtype)
    live = exact_lse > -math.inf
    out_error = (peer_out.double() - exact_out).abs().max() if exact_out.numel() else torch.tensor(0.0)
    lse_error = (peer_lse.double() - exact_lse)[live].abs().max() if live.any() else torch.tensor(0.0)
    rounding = torch.finfo(outs[0].dtype).eps / 2
    return (
        2 * out_error + rounding * exact_out.abs() + LOG2_ROUNDING,
        2 * lse_error + LOG2_ROUNDING * exact_lse.abs().nan_to_num(posinf=0).clamp_min(1),
    )


def check_merge(backend, states):
    outs, lses = zip(*states, strict=True)
    out, lse = backend.merge(states)
    exact_out, exact_lse = merge_reference(outs, lses)
    assert out.dtype == outs[0].dtype and lse.dtype == torch.float32 and out.shape == outs[0].shape
    out, lse = out.cpu().double(), lse.cpu().double()
    dead = exact_lse == -math.inf
    assert torch.equal(lse == -math.inf, dead) and not out[dead].any()
    limit_out, limit_lse = merge_limits(outs, lses, exact_out, exact_lse)
    assert ((out - exact_out).abs() <= limit_out).all()
    assert ((lse - exact_lse)[~dead].abs() <= limit_lse[~dead]).all()


@pytest.mark.parametrize("count", (1, 2, 3, 4, 5))
@pytest.mark.parametrize("dtype", (BF16, FP16, FP32), ids=str)
def test_merge_counts(backend, count, dtype):
    check_merge(backend, states_of(count, (7, 3, 64), dtype, backend.device))


@pytest.mark.parametrize(
    "shape", ((0, 4, 16), (1, 1, 16), (33, 5, 80), (4, 32, 128), (3, 2, 256), (300, 1, 40)), ids=str
)
def test_merge_shapes(backend, shape):
    check_merge(backend, states_of(2, shape, FP16, backend.device))


@pytest.mark.parametrize("empty", (0.0, 1.0), ids=("none-empty", "all-empty"))
def test_merge_of_empty_states(backend, empty):
    check_merge(backend, states_of(3, (5, 2, 32), FP32, backend.device, empty=empty))


def test_merge_with_an_empty_state_changes_nothing(backend):
    ((out, lse),) = states_of(1, (5, 2, 32), FP16, backend.device, empty=0)
    nothing = torch.full_like(out, math.nan), torch.full_like(lse, -math.inf)
    for states in ([(out, lse), nothing], [nothing, (out, lse)], [nothing, (out, lse), nothing]):
        merged, merged_lse = backend.merge(states)
        torch.testing.assert_close(merged, out, rtol=0, atol=0)
        torch.testing.assert_close(merged_lse, lse, rtol=1e-6, atol=1e-6)


def test_merge_of_far_apart_states(backend):
    """Weights under- and overflow in any fixed reference: the maximum must be taken off."""
    ((a, _), (b, _)) = states_of(2, (4, 2, 16), FP32, backend.device, empty=0)
    for low, high in ((-30000.0, 30000.0), (1e30, 1e31), (-1e31, -1e30)):
        lses = torch.full((4, 2), low, device=backend.device), torch.full((4, 2), high, device=backend.device)
        merged, lse = backend.merge([(a, lses[0]), (b, lses[1])])
        torch.testing.assert_close(merged, b)
        torch.testing.assert_close(lse, lses[1])


def test_merge_takes_strided_states(backend):
    states = [
        (out.transpose(0, 1).contiguous().transpose(0, 1), lse.T.contiguous().T)
        for out, lse in states_of(3, (6, 4, 32), FP16, backend.device)
    ]
    mixed = [states[0], *states_of(1, (6, 4, 32), FP16, backend.device, seed=9), *states[1:]]
    assert not states[0][0].is_contiguous() and not states[0][1].is_contiguous()
    check_merge(backend, mixed)


def test_merge_repeats_bitwise_and_leaves_inputs(backend):
    states = states_of(4, (9, 3, 64), BF16 if not backend.interpreted else FP16, backend.device)
    before = [(out.clone(), lse.clone()) for out, lse in states]
    first, second = backend.merge(states), backend.merge(states)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    for (out, lse), (was, was_lse) in zip(states, before, strict=True):
        torch.testing.assert_close(out, was, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(lse, was_lse)


@pytest.mark.parametrize("cuts", ((0, 16, 40), (0, 8, 8, 24, 40)), ids=str)
def test_attention_over_parts_merges_to_the_whole(backend, cuts):
    """Keys of every sequence cut at page edges; parts are not causal, as a shared prefix is."""
    whole = backend.build(Case("whole", (3, 2), (40, 40), page_size=8, dtype=FP32, causal=False))
    b = whole.batch
    states = []
    for low, high in itertools.pairwise(cuts):
        pages = torch.tensor([0, (high - low) // 8]).repeat(2).reshape(2, 2)
        ids = torch.cat([b.page_table[s * 5 + low // 8 : s * 5 + high // 8] for s in range(2)])
        ptr = torch.tensor([0, *pages[:, 1].cumsum(0).tolist()]).to(b.kv_indptr)
        part = PagedBatch.csr(b.qo_indptr, ptr, ids, torch.full_like(b.last_page_len, 8))
        states.append(backend.attend(replace(whole, batch=part)))
    out, lse = backend.merge(states)
    exact_out, exact_lse = reference(whole.spec, whole.q, whole.kv.k_cache, whole.kv.v_cache, b)
    torch.testing.assert_close(out.cpu().double(), exact_out, rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(lse.cpu().double(), exact_lse, rtol=2e-6, atol=2e-6)
