"""What only a GPU shows: no host synchronisation, no recompilation, sizes past 2^31. Graphs are in test_graphs.py."""

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


# batch_invariant


class Pool:
    """A cache of random keys and values, sequences over random pages of it, and batches of sequences."""

    def __init__(self, spec, num_pages, seed):
        self.spec, self.rng = spec, random.Random(seed)
        self.generator = torch.Generator("cuda").manual_seed(seed)
        shape = (num_pages, spec.page_size, spec.num_kv_heads, spec.head_dim)
        self.kv = PagedKV(*(self.randn(*shape) for _ in range(2)))

    def randn(self, *shape):
        return torch.randn(shape, device="cuda", dtype=self.spec.dtype, generator=self.generator)

    def sequence(self, q_len, kv_len):
        pages = -(-kv_len // self.spec.page_size)
        ids = torch.randint(self.kv.num_pages, (pages,), device="cuda", generator=self.generator)
        return self.randn(q_len, self.spec.num_qo_heads, self.spec.head_dim), ids.int(), kv_len

    def neighbours(self):
        """None, some like the one between them, or many that would change how a batch is tiled and cut."""
        count, longest = self.rng.choice([(0, 1), (3, 40), (30, 1), (30, 400), (150, 2), (1, 3000)])
        return [self.sequence(self.rng.randint(0, longest), self.rng.choice([0, 1, 90, 4000])) for _ in range(count)]

    def batch(self, sequences):
        """(q, batch)."""
        page_size = self.spec.page_size
        counts = [len(ids) for _, ids, _ in sequences]
        last = [kv - (n - 1) * page_size if n else 0 for n, (_, _, kv) in zip(counts, sequences, strict=True)]
        starts = [torch.tensor([0, *lens]).cumsum(0).int() for lens in ([len(q) for q, _, _ in sequences], counts)]
        tensors = (*(x.cuda() for x in starts), torch.cat([ids for _, ids, _ in sequences]), torch.tensor(last).cuda())
        return torch.cat([q for q, _, _ in sequences]), PagedBatch.csr(*tensors)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("lengths", [(1, 5000), (2, 900), (1, 40_000), (40, 3000), (300, 300), (700, 9), (3, 0)])
def test_invariant_results_are_those_of_the_sequence_alone(backend, lengths, page_size):
    """To the bit: alone, and in 20 random batches; with the plan made before and inside."""
    spec = AttentionSpec(16, 2, 128, page_size=page_size)
    pool = Pool(spec, 50_000 // page_size, seed=sum(lengths))
    subject = pool.sequence(*lengths)
    attention = BatchAttention(spec, batch_invariant=True, backend=backend)

    def attend(sequences, planned):
        q, batch = pool.batch(sequences)
        if not planned:
            return octavo.attend(q, pool.kv, batch, batch_invariant=True, backend=backend)
        attention.plan(batch, num_tokens=len(q))
        return attention.run(q, pool.kv)

    q, batch = pool.batch([subject])
    alone = attend([subject], planned=False)
    rows = sample_rows(spec, batch, len(q), max_rows=8, max_keys=100_000)
    assert_matches(Problem(spec, q, pool.kv, batch), *alone, rows)
    for trial in range(20):
        before, after = pool.neighbours(), pool.neighbours()
        first = sum(len(q) for q, _, _ in before)
        out, lse = attend([*before, subject, *after], planned=trial % 2 == 0)
        own = slice(first, first + lengths[0])
        assert torch.equal(out[own], alone[0]) and torch.equal(lse[own], alone[1]), f"trial {trial}"


# Sizes past 2^31


def codes_of(x, q_lens, kv_lens):
    """Make all keys 0, and each value its sequence's number modulo 64, so that every row's result is known: (out of any
    element, lse) of each row."""
    spec, device = x.spec, x.q.device
    q_lens, kv_lens = (torch.tensor(lens, device=device) for lens in (q_lens, kv_lens))
    codes = 1 + torch.arange(len(q_lens), device=device) % 64 / 64
    pages = -(-kv_lens // spec.page_size)
    x.kv.k_cache.zero_()
    x.kv.v_cache[x.batch.page_table.long()] = codes.repeat_interleave(pages)[:, None, None, None].to(spec.dtype)
    token = torch.arange(len(x.q), device=device) - (q_lens.cumsum(0) - q_lens).repeat_interleave(q_lens)
    seen = (token + (kv_lens - q_lens).repeat_interleave(q_lens) + 1).clamp(min=0)
    return torch.where(seen > 0, codes.repeat_interleave(q_lens), 0.0), seen.double().log2().float()


def check_every_row(x, q_lens, kv_lens, backend):
    """By closed form, with the plan made inside the call and before it."""
    out_value, lse_value = codes_of(x, q_lens, kv_lens)
    attention = BatchAttention(x.spec, backend=backend)
    attention.plan(x.batch, num_tokens=len(x.q))
    out = torch.full_like(x.q, math.nan)
    lse = torch.full(x.q.shape[:2], math.nan, device="cuda")
    for call in (
        lambda: attention.run(x.q, x.kv, out=out, lse=lse),
        lambda: octavo.attend(x.q, x.kv, x.batch, backend=backend),
    ):
        got, got_lse = call()
        # amin and amax copy nothing; both are NaN where any element is.
        assert torch.allclose(got.amin((1, 2)).float(), out_value, atol=4e-3)
        assert torch.allclose(got.amax((1, 2)).float(), out_value, atol=4e-3)
        assert torch.allclose(got_lse, lse_value[:, None].expand_as(got_lse), atol=1e-3)


def check_sampled_rows(x, backend, **bounds):
    out, lse = octavo.attend(x.q, x.kv, x.batch, backend=backend)
    rows = sample_rows(x.spec, x.batch, len(x.q), **bounds)
    assert_matches(Problem(x.spec, x.q, x.kv, x.batch), out, lse, rows)


WIDE = AttentionSpec(32, 4, 128)


@pytest.mark.heavy
@pytest.mark.parametrize("longest", [1, 3, 400], ids=["decodes", "short", "mixed"])
def test_66000_sequences(backend, longest):
    rng = random.Random(longest)
    q_lens = [1 if rng.random() < 0.99 else rng.randint(0, longest) for _ in range(66_000)]
    kv_lens = [rng.randint(0, 60) for _ in q_lens]
    kv_lens[1], kv_lens[-1] = 3000, 5000
    x = inputs_for(q_lens, kv_lens)
    check_sampled_rows(x, backend, max_rows=24, max_keys=30_000)
    check_every_row(x, q_lens, kv_lens, backend)


@pytest.mark.heavy
@pytest.mark.parametrize("lengths", [((100,) * 5300, (120,) * 5300), ((500_000, 40_000), (300, 40_000))])
def test_half_a_million_rows(backend, lengths):
    """q and out pass 2^31 elements, in rows that see keys and in rows that see none."""
    x = inputs_for(*lengths, WIDE)
    assert x.q.numel() > 2**31
    check_sampled_rows(x, backend, max_rows=16, max_keys=100_000)
    check_every_row(x, *lengths, backend)


@pytest.mark.heavy
@pytest.mark.parametrize("q_len", [1, 70], ids=["decode", "prefill"])
def test_4_million_pages(backend, q_len):
    """Offsets into each cache pass 2^31 elements, and pages of a sequence lie all over it."""
    lengths = (q_len,) * 430, (10_000,) * 430
    x = inputs_for(*lengths, WIDE)
    assert x.kv.num_pages > 4_300_000 and x.kv.k_cache.numel() > 2**31
    check_sampled_rows(x, backend, max_rows=16, max_keys=100_000)
    check_every_row(x, *lengths, backend)


@pytest.mark.heavy
@pytest.mark.parametrize("q_len", [1, 130], ids=["decode", "prefill"])
def test_a_million_keys_of_one_sequence(backend, q_len):
    lengths = (q_len,), (1_000_003,)
    x = inputs_for(*lengths, AttentionSpec(8, 2, 64, page_size=16, dtype=torch.float16))
    check_sampled_rows(x, backend, max_rows=2, max_keys=2_500_000)
    check_every_row(x, *lengths, backend)
