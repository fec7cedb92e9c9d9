"""What only a GPU shows: no host synchronisation, no recompilation, CUDA graphs, large offsets."""

import math
import random

import pytest
import torch
from inputs import Problem
from tolerance import assert_matches

import octavo
from octavo import AttentionSpec, BatchAttention, PagedBatch, PagedKV
from octavo.backends import BACKENDS, arch_of
from octavo.bench.sampling import sample_rows
from octavo.bench.workloads import Workload, make_inputs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SPEC = AttentionSpec(8, 2, 64, dtype=torch.float16)
GPU_BACKENDS = [
    b.name for b in BACKENDS if torch.cuda.is_available() and not b.reject(SPEC, arch_of(torch.device("cuda")))
]


def inputs_for(qo_lens, kv_lens, spec=SPEC, seed=0):
    return make_inputs(Workload("test", tuple(qo_lens), tuple(kv_lens)), spec, "cuda", seed=seed)


@pytest.fixture(params=GPU_BACKENDS)
def backend(request):
    return request.param


@pytest.fixture
def no_sync():
    """A context in which a host synchronisation is an error; warm up before it, for compiling may synchronise."""

    class NoSync:
        def __enter__(self):
            torch.cuda.set_sync_debug_mode("error")

        def __exit__(self, *_):
            torch.cuda.set_sync_debug_mode("default")

    return NoSync()


def test_run_plan_append_merge_do_not_synchronise(backend, no_sync):
    x = inputs_for([3, 0, 40], [9, 5, 300])
    attn = BatchAttention(SPEC, max_tokens=64, max_sequences=8, backend=backend)
    scale = torch.tensor(0.1, device="cuda")
    k = torch.randn(43, 2, 64, device="cuda", dtype=torch.float16)

    def step():
        octavo.attend(x.q, x.kv, x.batch, backend=backend)
        attn.plan(x.batch)
        state = attn.run(x.q, x.kv, sm_scale=scale)
        octavo.append(k, k, x.kv, x.batch)
        return octavo.merge([state, state])

    step()
    with no_sync:
        step()


@pytest.fixture
def compilations(monkeypatch):
    """Names of the kernels that Triton compiles, or loads compiled, from here on."""
    import triton

    names = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda *, fn, **_: names.append(fn.name))

    @triton.jit
    def probe(x):
        pass

    probe[(1,)](torch.zeros(1, device="cuda"))
    assert len(names) == 1, "the hook sees no compilation"
    return names


def test_compile_count_stays_flat(backend, compilations):
    """Neither lengths, batch size, scale nor addresses make a new kernel; what a kept one computes stays right."""
    rng = random.Random(0)

    def call(longest, scale, seed):
        count = rng.randint(1, 9)
        q_lens, kv_lens = ([rng.randint(0, n) for _ in range(count)] for n in (longest, 400))
        x = inputs_for(q_lens, kv_lens, seed=seed)
        result = octavo.attend(x.q, x.kv, x.batch, sm_scale=scale, backend=backend)
        octavo.append(x.q[:, :2], x.q[:, 2:4], x.kv, x.batch)
        octavo.merge([result, result])
        return x, result

    for seed, longest in enumerate((1, 4, 12, 90, 300) * 4):
        call(longest, 0.125, seed)
    warm = len(compilations)
    for seed in range(64):
        scale = rng.uniform(-1, 1)
        x, _ = call(rng.choice([1, 3, 17, 200]), scale, seed)
        problem = Problem(SPEC, x.q, x.kv, x.batch, scale)
        rows = sample_rows(SPEC, x.batch, x.q.shape[0], max_rows=12)
        out, lse = octavo.attend(x.q, x.kv, x.batch, sm_scale=scale, backend=backend)
        assert_matches(problem, out, lse, rows)
    assert compilations[warm:] == []


def test_graph_replays_other_lengths(backend):
    max_tokens, max_sequences, max_entries = 200, 6, 2000
    attn = BatchAttention(SPEC, max_tokens=max_tokens, max_sequences=max_sequences, backend=backend)
    generator = torch.Generator(device="cuda").manual_seed(0)
    cache = torch.randn(2000, 2, 1, 2, 64, device="cuda", dtype=torch.float16, generator=generator)
    kv = PagedKV.combined(cache)
    q = torch.zeros(max_tokens, 8, 64, device="cuda", dtype=torch.float16)
    qo = torch.zeros(max_sequences + 1, dtype=torch.int32, device="cuda")
    ptr = torch.zeros(max_sequences + 1, dtype=torch.int32, device="cuda")
    ids = torch.zeros(max_entries, dtype=torch.int32, device="cuda")
    out, lse = torch.empty_like(q), torch.empty(max_tokens, 8, device="cuda")
    batch = PagedBatch.csr(qo, ptr, ids)

    def step():
        attn.plan(batch)
        attn.run(q, kv, out=out, lse=lse)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    rng = random.Random(1)
    for _ in range(6):
        q_lens = [rng.choice([0, 1, 5, 33]) for _ in range(max_sequences)]
        kv_lens = [rng.choice([0, 1, 60, 330]) for _ in range(max_sequences)]
        tokens, keys = sum(q_lens), sum(kv_lens)
        q.copy_(torch.randn(q.shape, device="cuda", generator=generator))
        qo.copy_(torch.tensor([0, *q_lens]).cumsum(0))
        ptr.copy_(torch.tensor([0, *kv_lens]).cumsum(0))
        ids[:keys] = torch.randperm(2000, device="cuda", generator=generator)[:keys].int()
        ids[keys:] = -7
        out.fill_(math.nan)
        lse.fill_(math.nan)
        attn._workspace.fill_(-1)
        graph.replay()
        replayed = out.clone(), lse.clone()
        step()
        assert torch.equal(replayed[0], out) and torch.equal(replayed[1], lse)
        assert_matches(Problem(SPEC, q, kv, batch), out, lse)
        assert (lse[tokens:] == -math.inf).all() and (out[tokens:] == 0).all()


def test_wrong_shapes_are_refused_without_synchronising(backend, no_sync):
    x = inputs_for([3], [9])
    with no_sync:
        with pytest.raises(ValueError, match="k_cache: expected shape"):
            octavo.attend(x.q.repeat(1, 1, 2), x.kv, x.batch, backend=backend)
        with pytest.raises(TypeError, match="k_cache: expected dtype"):
            octavo.attend(x.q.bfloat16(), x.kv, x.batch, backend=backend)


def test_cpu_tensors_are_computed_on_the_gpu():
    x = make_inputs(Workload("test", (5, 1), (9, 40)), SPEC, "cpu")
    out, lse = octavo.attend(x.q, x.kv, x.batch)
    assert_matches(Problem(SPEC, x.q, x.kv, x.batch), out, lse)


def test_bad_page_ids(backend):
    x = inputs_for([4], [8])
    x.batch.page_table[3] = 1 << 30
    x.batch.page_table[5] = -(1 << 30)
    with pytest.raises(ValueError, match="kv_indices: expected values from 0"):
        octavo.attend(x.q, x.kv, x.batch, validate=True, backend=backend)
    out, _ = octavo.attend(x.q, x.kv, x.batch, backend=backend)
    torch.cuda.synchronize()
    assert out.isfinite().all()


def test_broken_indptr_does_not_fault(backend):
    x = inputs_for([4, 5, 6], [8, 9, 10])
    for qo, ptr in (
        ([0, 9, 4, 900], [0, 8, 17, 27]),
        ([0, 4, 9, 15], [0, 1 << 20, -5, 27]),
        ([-9, 4, 9, 15], [5, 4, 3, 2]),
    ):
        broken = PagedBatch.csr(torch.tensor(qo, device="cuda"), torch.tensor(ptr, device="cuda"), x.batch.page_table)
        octavo.attend(x.q, x.kv, broken, backend=backend)
        torch.cuda.synchronize()


def test_batches_repeat_bitwise(backend):
    rng = random.Random(2)
    for seed in range(10):
        count = rng.randint(1, 12)
        x = inputs_for(
            [rng.randint(0, 150) for _ in range(count)], [rng.randint(0, 900) for _ in range(count)], seed=seed
        )
        first = octavo.attend(x.q, x.kv, x.batch, backend=backend)
        for _ in range(10):
            again = octavo.attend(x.q, x.kv, x.batch, backend=backend)
            assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
