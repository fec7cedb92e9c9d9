"""The sm_90 kernel on a GPU that has it. What needs none, the choice of it and its probe, is in test_backends.py."""

import math
import random
import warnings

import pytest
import torch
from inputs import BAD_PAGE, BF16, FP16, KV_STORAGE, Problem, indptr, pages_of
from tolerance import assert_matches

import octavo
from octavo import AttentionSpec, BatchAttention, PagedBatch, PagedKV, api, work_item
from octavo.backends import hopper, tensor_maps
from octavo.backends.hopper import HopperBackend, HopperRun
from octavo.calls import Remembered
from octavo.planning.form import PlanForm
from octavo.planning.tiles import LARGE_ROWS

DEVICE, BACKEND = "cuda", "hopper"
KEYS_AT_ONCE, LAZY_BITS = 128, 8
ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
gpu = pytest.mark.gpu
needs_hopper = pytest.mark.skipif(not ON_HOPPER, reason="needs compute capability 9.0")
SPEC = AttentionSpec(16, 2, 128)


def on_hopper(test):
    return gpu(needs_hopper(test))


def make(spec, q_lens, kv_lens, scattered=True, seed=0, padding=3, storage="nhd"):
    """A problem, and the cache rows of its keys. NaN is in unused pages, tails of pages and padding rows of q."""
    page_size, counts = spec.page_size, torch.tensor(pages_of(kv_lens, spec.page_size))
    used, generator = int(counts.sum()), torch.Generator(DEVICE).manual_seed(seed)
    order = torch.randperm(used + 5) if scattered else torch.arange(3, used + 5)
    ids = order[:used]
    place_in_sequence = torch.arange(used) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    position = place_in_sequence[:, None] * page_size + torch.arange(page_size)
    rows = ids[:, None] * page_size + torch.arange(page_size)
    rows = rows[position < torch.tensor(kv_lens).repeat_interleave(counts)[:, None]].to(DEVICE)
    caches = []
    for _ in range(2):
        cache = torch.full(((used + 5) * page_size, spec.num_kv_heads, spec.head_dim), math.nan, device=DEVICE)
        cache[rows] = torch.randn(len(rows), *cache.shape[1:], device=DEVICE, generator=generator)
        caches.append(cache.to(spec.dtype).view(used + 5, page_size, *cache.shape[1:]))
    q = torch.randn(sum(q_lens), spec.num_qo_heads, spec.head_dim, device=DEVICE, generator=generator)
    q = torch.cat([q, torch.full((padding, *q.shape[1:]), math.nan, device=DEVICE)]).to(spec.dtype)
    last = torch.tensor([n - (c - 1) * page_size if c else 0 for n, c in zip(kv_lens, counts.tolist(), strict=True)])
    table = torch.cat([ids, torch.full((3,), BAD_PAGE)]).int()
    batch = PagedBatch.csr(indptr(q_lens), indptr(counts.tolist()), table, last.int()).to(DEVICE)
    return Problem(spec, q, KV_STORAGE[storage](*caches), batch), rows


def attend(p, **options):
    return octavo.attend(p.q, p.kv, p.batch, sm_scale=p.sm_scale, causal=p.spec.causal, backend=BACKEND, **options)


@pytest.fixture
def launches(monkeypatch):
    """Calls of the kernel. Batches of few rows get tiles of 128 rows too, which are the kernel's. Nothing is probed."""
    seen, launch = [], HopperRun.__call__
    monkeypatch.setattr(HopperRun, "__call__", lambda self, call, plan: (seen.append(call), launch(self, call, plan)))
    monkeypatch.setattr(api, "READY", Remembered())
    monkeypatch.setattr(hopper, "compile_failure", lambda spec: None)
    monkeypatch.setattr(HopperBackend, "plan_form", lambda *_, **__: PlanForm(LARGE_ROWS, 0, 0, 0))
    return seen


# Items


FORMS = [
    AttentionSpec(1, 1, 64),
    AttentionSpec(14, 2, 64, page_size=16, causal=False, dtype=FP16),
    AttentionSpec(8, 1, 64, page_size=64),
    AttentionSpec(16, 2, 128),
    AttentionSpec(3, 1, 128, page_size=16),
    AttentionSpec(2, 2, 128, page_size=64, causal=False),
    AttentionSpec(7, 1, 256, causal=False),
    AttentionSpec(8, 1, 256, page_size=16),
    AttentionSpec(3, 1, 256, page_size=64, dtype=FP16),
]
EDGES = sorted({max(64 * i + d, 0) for i in range(7) for d in (-1, 0, 1)})


def name_of(spec):
    return f"g{spec.group_size} d{spec.head_dim} ps{spec.page_size} {'causal' if spec.causal else 'full'}"


def small_lengths(spec):
    """(q_lens, kv_lens): every key count round the edges of blocks with every row count round the edges of tiles."""
    tokens = {1, 2, *(n * LARGE_ROWS // spec.group_size + d for n in (1, 2) for d in (-1, 0, 1))}
    pairs = [(q, kv) for q in sorted(tokens) for kv in EDGES]
    random.Random(0).shuffle(pairs)
    return tuple(zip(*pairs, strict=True))


@on_hopper
@pytest.mark.parametrize("scattered", [True, False], ids=["scattered", "consecutive"])
@pytest.mark.parametrize("spec", FORMS, ids=name_of)
def test_small_items(spec, scattered, launches):
    """Every wait has its arrival: no block, one, an odd and an even number; one row to two tiles and one more."""
    p, _ = make(spec, *small_lengths(spec), scattered=scattered)
    assert_matches(p, *attend(p))
    assert len(launches) == 1


@on_hopper
@pytest.mark.parametrize(
    ("storage", "page_size"), [*((s, n) for n in (1, 16) for s in KV_STORAGE), ("combined", 64), ("combined", 3)]
)
@pytest.mark.parametrize("scattered", [True, False], ids=["scattered", "consecutive"])
def test_cache_views(storage, page_size, scattered, launches):
    p, _ = make(AttentionSpec(8, 2, 64, page_size=page_size), (40, 3, 131), (300, 129, 131), scattered, storage=storage)
    assert_matches(p, *attend(p))
    assert len(launches) == (storage != "unaligned")


@on_hopper
@pytest.mark.parametrize("lengths", [((1500, 40, 0, 700), (3, 0, 9, 300)), ((5000,), (1,)), ((700, 9), (0, 0))])
def test_rows_that_see_nothing(lengths, launches):
    """Runs of several tiles without keys, tiles with rows of both kinds, and padding."""
    p, _ = make(SPEC, *lengths, padding=400)
    out, lse = torch.full_like(p.q, math.nan), torch.full(p.q.shape[:2], math.nan, device=DEVICE)
    attention = BatchAttention(p.spec, device=DEVICE, backend=BACKEND)
    attention.plan(p.batch, num_tokens=p.q.shape[0])
    attention.run(p.q, p.kv, out=out, lse=lse)
    assert_matches(p, out, lse)
    assert len(launches) == 1


# The running maximum


def along_one_axis(p, rows, q_signs, bits):
    """Make key i's logit bits[i] times the query head's sign, in bits (powers of 2), beside some noise."""
    p.q[: len(p.q) - 3] *= 0.1
    p.q[: len(p.q) - 3, :, 0] = q_signs * 8.0
    k = p.kv.k_cache.view(-1, *p.kv.k_cache.shape[2:])
    k[rows, :, 0] = (bits / (8.0 * p.spec.default_scale * math.log2(math.e)))[:, None].to(k)
    return p


@on_hopper
@pytest.mark.parametrize("direction", [1, -1], ids=["rising", "falling"])
@pytest.mark.parametrize("step", [0.5, LAZY_BITS - 0.5, LAZY_BITS + 0.5, 40, 300])
@pytest.mark.parametrize("spec", [SPEC, AttentionSpec(8, 1, 256, page_size=16)], ids=name_of)
def test_maximum_moves_in_every_block(spec, step, direction, launches):
    """By less than makes the sums be scaled, by more, and so far that 2^logit overflows. Heads go in opposite ways."""
    keys = 1450
    p, rows = make(spec, (150,), (keys,))
    bits = direction * step * (keys / 2 - torch.arange(keys, device=DEVICE)) / KEYS_AT_ONCE
    signs = torch.tensor([1.0, -1.0] * (spec.num_qo_heads // 2), device=DEVICE)
    assert_matches(p, *attend(along_one_axis(p, rows, signs, bits)))
    assert len(launches) == 1


@on_hopper
@pytest.mark.parametrize("gain", [1, 60], ids=["ordinary", "large logits"])
@pytest.mark.parametrize("spec", [FORMS[0], FORMS[-1]], ids=name_of)
def test_rows_without_keys_in_the_first_blocks(spec, gain, launches):
    """A tile's blocks begin at its last key, and its first rows see only those that come later."""
    p, _ = make(spec, (128, 128, 200, 300), (192, 129, 265, 300))
    p.q.mul_(gain)
    assert_matches(p, *attend(p))
    assert len(launches) == 1


@on_hopper
@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("scale", [0.3, -0.3, 0.0, -0.0, 1e-35, -4.0])
def test_scales(scale, tensor, launches):
    p, _ = make(SPEC, (70, 5, 30), (300, 129, 10))
    p = p.with_(sm_scale=torch.tensor(scale, device=DEVICE) if tensor else scale)
    assert_matches(p, *attend(p))
    assert len(launches) == 1


# Strides and sizes


def rows_between(x, gap):
    """x in memory that has `gap` more elements after each row of heads."""
    view = x.new_full((x.shape[0], x.shape[1] * x.shape[2] + gap), math.nan)[:, : x.shape[1] * x.shape[2]]
    return view.view(x.shape).copy_(x)


@on_hopper
@pytest.mark.parametrize(("q_gap", "out_gap"), [(0, 0), (8, 0), (0, 24), (256, 512), (1, 0), (0, 4), (12, 8)])
def test_strides(q_gap, out_gap, launches):
    """Multiples of 16 bytes are the kernel's; others are the portable one's, and as right."""
    p, _ = make(SPEC, (70, 5, 30), (300, 129, 10))
    p = p.with_(q=rows_between(p.q, q_gap))
    out, lse = rows_between(torch.zeros_like(p.q), out_gap), torch.zeros(p.q.shape[1], len(p.q), device=DEVICE).t()
    width = p.q[0].numel()
    between = out.as_strided((len(out) - 1, out_gap), (width + out_gap, 1), width)
    attention = BatchAttention(p.spec, device=DEVICE, backend=BACKEND)
    attention.plan(p.batch, num_tokens=len(p.q))
    attention.run(p.q, p.kv, out=out, lse=lse)
    assert_matches(p, out, lse)
    assert between.isnan().all(), "written between rows"
    assert len(launches) == (q_gap % 8 == 0 and out_gap % 8 == 0)


def sparse_cache(page_size, pages, ids, heads, dim):
    """A combined cache of which only the given pages are filled."""
    cache = torch.empty(pages, 2, page_size, heads, dim, dtype=BF16, device=DEVICE)
    cache[ids] = torch.randn(len(ids), *cache.shape[1:], device=DEVICE).to(BF16)
    return PagedKV.combined(cache)


@on_hopper
@pytest.mark.heavy
@pytest.mark.parametrize(("gigabytes", "served"), [(10, True), (66, False)])
def test_large_caches(gigabytes, served, launches):
    """Beyond 2^31 elements, and beyond the 64 GiB that 32 bits of 16 bytes reach."""
    page_size, heads, dim = 16, 2, 64
    pages = gigabytes * 2**30 // (2 * page_size * heads * dim * 2)
    if torch.cuda.mem_get_info()[0] < (gigabytes + 3) * 2**30:
        pytest.skip("the device has too little memory left")
    ids = torch.cat([torch.arange(pages - 12, pages), torch.tensor([3, 0, pages // 2])]).to(DEVICE)
    kv = sparse_cache(page_size, pages, ids, heads, dim)
    batch = PagedBatch.csr(indptr((90,)), indptr((15,)), ids.cpu().int(), torch.tensor([9])).to(DEVICE)
    spec = AttentionSpec(8, heads, dim, page_size=page_size)
    p = Problem(spec, torch.randn(90, 8, dim, device=DEVICE).to(BF16), kv, batch)
    assert_matches(p, *attend(p))
    assert len(launches) == served


# Repetition, graphs, streams


def random_batch(seed, most_keys=900):
    rng = random.Random(seed)
    count = rng.randint(1, 12)
    lengths = [rng.randint(0, 150) for _ in range(count)], [rng.randint(0, most_keys) for _ in range(count)]
    return make(SPEC, *lengths, scattered=rng.random() < 0.5, seed=seed)[0]


@on_hopper
def test_bitwise_repeatable(launches):
    for seed in range(20):
        p = random_batch(seed)
        out, lse = attend(p)
        for _ in range(200):
            again = attend(p)
            assert torch.equal(again[0], out) and torch.equal(again[1], lse)
    assert len(launches) == 20 * 201


@on_hopper
def test_one_plan_serves_many_runs(launches):
    """The counter that items are drawn from is as it was after every run."""
    p = random_batch(3)
    attention = BatchAttention(SPEC, device=DEVICE, backend=BACKEND)
    attention.plan(p.batch, num_tokens=len(p.q))
    for layer in range(6):
        q = torch.randn(p.q.shape, device=DEVICE).to(p.q)
        problem = p.with_(q=q)
        assert_matches(problem, *attention.run(q, p.kv))
        assert int(attention._workspace[work_item.ITEMS_TAKEN]) == 0
        assert len(launches) == layer + 1


@on_hopper
@pytest.mark.parametrize("known", [True, False], ids=["maps known", "maps unknown"])
def test_graph_replays_other_lengths(known, launches, monkeypatch):
    """Also where caches are met first while capturing, when no descriptors can be made for them."""
    most_tokens, most_sequences, pages = 600, 6, 3000
    attn = BatchAttention(SPEC, max_tokens=most_tokens, max_sequences=most_sequences, backend=BACKEND)
    kv = PagedKV(*(torch.randn(pages, 1, 2, 128, device=DEVICE).to(BF16) for _ in range(2)))
    q = torch.zeros(most_tokens, 16, 128, device=DEVICE, dtype=BF16)
    out, lse = torch.empty_like(q), torch.empty(most_tokens, 16, device=DEVICE)
    batch = PagedBatch.csr(*(torch.zeros(n, dtype=torch.int32, device=DEVICE) for n in (7, 7, pages)))

    def step():
        attn.plan(batch)
        attn.run(q, kv, out=out, lse=lse)

    with monkeypatch.context() as patch:
        if not known:
            patch.setattr(hopper.MAPS, "find", lambda *_: None)
        step()  # compiles, which capturing must not
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed in range(8):
        rng = random.Random(seed)
        q_lens = [rng.choice([0, 1, 5, 40, 100]) for _ in range(most_sequences)]
        kv_lens = [rng.choice([0, 1, 60, 129, 400]) for _ in range(most_sequences)]
        q.copy_(torch.randn(q.shape, device=DEVICE))
        batch.qo_indptr.copy_(indptr(q_lens))
        batch.kv_indptr.copy_(indptr(kv_lens))
        ids = torch.arange(pages) if seed % 2 else torch.randperm(pages)
        batch.page_table.copy_(ids)
        out.fill_(math.nan), lse.fill_(math.nan)
        graph.replay()
        assert_matches(Problem(SPEC, q, kv, batch), out, lse)
    assert len(launches) == 2


@on_hopper
def test_streams_at_once(launches):
    problems = [random_batch(seed, most_keys=3000) for seed in range(4)]
    wanted = [attend(p) for p in problems]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in problems]
    for _ in range(20):
        got = []
        for p, stream in zip(problems, streams, strict=True):
            with torch.cuda.stream(stream):
                got.append(attend(p))
        torch.cuda.synchronize()
        for (out, lse), (again, lse_again) in zip(wanted, got, strict=True):
            assert torch.equal(out, again) and torch.equal(lse, lse_again)


@on_hopper
def test_maps_are_kept_by_layout():
    """One pair serves every stream, and a graph captured on another than the one it was written on."""
    k, v = (torch.zeros(64, 1, 2, 128, device=DEVICE, dtype=BF16) for _ in range(2))
    maps = tensor_maps.TensorMaps()
    first = maps.find(k, v, tensor_maps.RUNS_FLAT)
    assert maps.find(k, v, tensor_maps.RUNS_FLAT) is first and first.shape == (2 * tensor_maps.MAP_BYTES,)
    assert maps.find(k, v[:32], tensor_maps.RUNS_FLAT) is not first
    with torch.cuda.stream(torch.cuda.Stream()):
        assert maps.find(k, v, tensor_maps.RUNS_FLAT) is first
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert maps.find(k, v, tensor_maps.RUNS_FLAT) is first
        assert maps.find(k[:16], v, tensor_maps.RUNS_FLAT) is None
        torch.zeros(1, device=DEVICE)


@on_hopper
def test_no_maps_past_the_limit(monkeypatch):
    k, v = (torch.zeros(64, 1, 2, 128, device=DEVICE, dtype=BF16) for _ in range(2))
    monkeypatch.setattr(tensor_maps, "MAX_MAPS", 1)
    maps = tensor_maps.TensorMaps()
    assert maps.find(k, v, tensor_maps.RUNS_FLAT) is not None
    assert maps.find(v, k, tensor_maps.RUNS_FLAT) is None


@on_hopper
def test_the_probe_passes_here():
    """No patch, no other name asked for: this is what users get."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention = BatchAttention(SPEC, device=DEVICE)
    assert "backend   hopper" in attention.explain() and "not hopper" not in attention.explain()
