"""CUDA graphs: captured once with upper bounds, replayed with other lengths, page tables and numbers of sequences."""

import inspect
import math
import random
from dataclasses import dataclass, replace

import pytest
import torch
from inputs import BAD_PAGE, Problem, indptr, pages_of
from tolerance import assert_matches

import octavo
from octavo import AttentionSpec, BatchAttention, PagedBatch, PagedKV, ops
from octavo.backends import BACKENDS, arch_of
from octavo.bench.sampling import sample_rows
from octavo.planning.form import DEFAULT_SPLIT, schedule_config
from octavo.planning.readback import items_end, read_plan

SPEC = AttentionSpec(16, 2, 128)
ON_GPU = torch.cuda.is_available()
GPU_BACKENDS = [b.name for b in BACKENDS if ON_GPU and not b.reject(SPEC, arch_of(torch.device("cuda")))]


def on_gpu(test):
    """Once for each backend of the device."""
    skip = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
    return pytest.mark.gpu(skip(pytest.mark.parametrize("backend", GPU_BACKENDS or ["none"])(test)))


@dataclass(frozen=True)
class Bounds:
    """What a graph is captured for, and the lengths that its replays choose from."""

    tokens: int
    sequences: int
    pages: int
    """Entries of the page table: of all sequences in CSR form, of each in dense form."""
    q_choices: tuple[int, ...]
    kv_choices: tuple[int, ...]
    page_size: int = 1
    dense: bool = False
    causal: bool = True
    batch_invariant: bool = False
    small: bool = False
    """Whether both lists of the plan have items in some replay."""
    cut: bool = True
    """Whether tiles are cut in some replay."""

    @property
    def spec(self) -> AttentionSpec:
        return replace(SPEC, page_size=self.page_size, causal=self.causal)


FORMS = {
    "decodes": Bounds(24, 24, 9000, (0, 1, 1, 1), (0, 1, 60, 330, 1500)),
    "decodes, dense": Bounds(24, 24, 100, (0, 1, 1, 1), (0, 1, 60, 330, 1500), page_size=16, dense=True),
    "mixed": Bounds(700, 24, 12_000, (0, 1, 1, 2, 17, 90), (0, 1, 60, 330, 2500), small=True),
    "mixed, dense": Bounds(
        700, 24, 50, (0, 1, 1, 2, 17, 90), (0, 1, 60, 3000), page_size=64, dense=True, causal=False, small=True
    ),
    "mixed, invariant": Bounds(
        700, 24, 700, (0, 1, 2, 17, 90), (0, 1, 60, 3000), page_size=16, batch_invariant=True, small=True
    ),
    "one prompt": Bounds(1500, 1, 6000, (100, 600, 1500), (40, 2000, 6000)),
    "short": Bounds(300, 20, 250, (0, 1, 5, 33), (0, 1, 9, 30), small=True, cut=False),
}


def lengths_of(bounds: Bounds, seed: int) -> tuple[list[int], list[int]]:
    """(q_lens, kv_lens) within bounds, by seed: nothing at all, two sequences, one that takes all tokens and keys, one
    that takes all keys for one token, more queries than keys, or any."""
    rng, count = random.Random(seed), bounds.sequences
    most_keys = bounds.pages * bounds.page_size
    kind = seed % 6
    q_lens = [rng.choice(bounds.q_choices) for _ in range(count)]
    kv_lens = [rng.choice(bounds.kv_choices) for _ in range(count)]
    if kind == 0:
        q_lens, kv_lens = [0] * count, [0] * count
    elif kind == 1:
        q_lens[2:], kv_lens[2:] = [0] * len(q_lens[2:]), [0] * len(kv_lens[2:])
    elif kind in (2, 3):
        own = count // 2
        q_lens, kv_lens = [0] * count, [0] * count
        q_lens[own], kv_lens[own] = bounds.tokens if kind == 2 else 1, most_keys
    elif kind == 4:
        kv_lens = [min(kv, q // 2) for q, kv in zip(q_lens, kv_lens, strict=True)]
    return _within(q_lens, bounds.tokens), _fitting(kv_lens, bounds)


def _within(lens: list[int], most: int) -> list[int]:
    kept = []
    for n in lens:
        kept.append(min(n, most - sum(kept)))
    return kept


def _fitting(kv_lens: list[int], bounds: Bounds) -> list[int]:
    if bounds.dense:
        return [min(n, bounds.pages * bounds.page_size) for n in kv_lens]
    pages = _within(pages_of(kv_lens, bounds.page_size), bounds.pages)
    return [min(n, p * bounds.page_size) for n, p in zip(kv_lens, pages, strict=True)]


class Step:
    """Buffers of fixed sizes, filled anew for every step, and attention over them."""

    def __init__(self, bounds: Bounds, device: str, backend: str) -> None:
        self.bounds, self.spec, self.device, self.backend = bounds, bounds.spec, device, backend
        spec, sequences = self.spec, bounds.sequences

        def index(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        pool = bounds.pages * (sequences if bounds.dense else 1) + 8
        self.cache = torch.zeros(
            pool, 2, spec.page_size, spec.num_kv_heads, spec.head_dim, dtype=spec.dtype, device=device
        )
        self.kv = PagedKV.combined(self.cache)
        self.q = torch.zeros(bounds.tokens, spec.num_qo_heads, spec.head_dim, dtype=spec.dtype, device=device)
        self.out, self.lse = torch.empty_like(self.q), torch.empty(self.q.shape[:2], device=device)
        if bounds.dense:
            table = index(sequences, bounds.pages)
            self.batch = PagedBatch.dense(index(sequences + 1), table, index(sequences))
        else:
            self.batch = PagedBatch.csr(
                index(sequences + 1), index(sequences + 1), index(bounds.pages), index(sequences)
            )
        self.attention = self.new_attention()

    def new_attention(self) -> BatchAttention:
        return BatchAttention(
            self.spec,
            device=self.device,
            max_tokens=self.bounds.tokens,
            max_sequences=self.bounds.sequences,
            batch_invariant=self.bounds.batch_invariant,
            backend=self.backend,
        )

    def fill(self, seed: int) -> None:
        """Other lengths, page ids, queries, keys and values; NaN wherever nothing may be read."""
        q_lens, kv_lens = lengths_of(self.bounds, seed)
        generator = torch.Generator(self.device).manual_seed(seed)
        counts, b = pages_of(kv_lens, self.spec.page_size), self.batch
        ids = torch.randperm(len(self.cache), device=self.device, generator=generator)[: sum(counts)]
        used = torch.zeros(len(self.cache), dtype=torch.bool, device=self.device)
        used[ids] = True
        self.cache.normal_(generator=generator)[~used] = math.nan
        self.q.normal_(generator=generator)[sum(q_lens) :] = math.nan
        b.qo_indptr.copy_(indptr(q_lens))
        b.page_table.fill_(BAD_PAGE)
        if b.is_dense:
            for row, own in zip(b.page_table, ids.split(counts), strict=True):
                row[: len(own)] = own
            b.kv_lens.copy_(torch.tensor(kv_lens))
        else:
            b.page_table[: len(ids)] = ids
            b.kv_indptr.copy_(indptr(counts))
            last = [n - (c - 1) * self.spec.page_size if c else 0 for n, c in zip(kv_lens, counts, strict=True)]
            b.last_page_len.copy_(torch.tensor(last))

    def poison(self) -> None:
        """Outputs, and all of the plan: the planner writes what is read of it, and parts their states."""
        self.out.fill_(math.nan)
        self.lse.fill_(math.nan)
        self.attention._workspace.fill_(-1)

    def __call__(self) -> None:
        self.attention.plan(self.batch)
        self.attention.run(self.q, self.kv, out=self.out, lse=self.lse)

    def eager(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The same by another BatchAttention."""
        attention = self.new_attention()
        attention.plan(self.batch)
        return attention.run(self.q, self.kv)

    def check(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        rows = sample_rows(self.spec, self.batch, len(self.q), max_rows=20, max_keys=40_000)
        assert_matches(Problem(self.spec, self.q, self.kv, self.batch), out, lse, rows)
        tokens = int(self.batch.qo_indptr[-1])
        assert (lse[tokens:] == -math.inf).all() and (out[tokens:] == 0).all()
        assert not lse.isnan().any() and not out.isnan().any()

    def schedule(self):
        """The plan that is in the workspace now, read back."""
        attention = self.attention
        config = schedule_config(attention._planner.form, DEFAULT_SPLIT)
        words = items_end(self.spec, attention._workspace.numel(), config)
        return read_plan(attention._workspace[:words].cpu())


def captured(call) -> torch.cuda.CUDAGraph:
    """Captured on the stream that it was warmed up on, so that descriptors of caches are known there."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    torch.cuda.synchronize()
    return graph


@pytest.mark.parametrize("bounds", [b for n, b in FORMS.items() if n in ("decodes", "mixed, dense")])
def test_steps_are_right_without_a_graph(bounds):
    """The harness itself, on the CPU."""
    small = replace(bounds, tokens=min(bounds.tokens, 60), pages=min(bounds.pages, 300))
    step = Step(small, "cpu", "cpu")
    for seed in range(6):
        step.fill(seed)
        step.poison()
        step()
        step.check(step.out, step.lse)
        q_lens, kv_lens = lengths_of(small, seed)
        assert sum(q_lens) <= small.tokens and int(step.batch.qo_indptr[-1]) == sum(q_lens)
        assert seed != 2 or (sum(q_lens), sum(kv_lens)) == (small.tokens, small.pages * small.page_size)


@on_gpu
@pytest.mark.parametrize("bounds", FORMS.values(), ids=FORMS)
def test_replays_equal_eager_steps(backend, bounds):
    step = Step(bounds, "cuda", backend)
    step.fill(5)
    graph = captured(step)
    small = cut = False
    for seed in range(18):
        step.fill(seed)
        step.poison()
        graph.replay()
        replayed = step.out.clone(), step.lse.clone()
        found = step.schedule()
        small |= bool(found.main and found.small)
        cut |= any(x.num_splits > 1 for x in found.main + found.small)
        want = step.eager()
        assert torch.equal(replayed[0], want[0]) and torch.equal(replayed[1], want[1]), f"seed {seed}"
        step.check(*replayed)
        # Once more, on the plan that is there: counters are where they were.
        step.attention.run(step.q, step.kv, out=step.out, lse=step.lse)
        assert torch.equal(replayed[0], step.out) and torch.equal(replayed[1], step.lse), f"seed {seed}, second layer"
    assert (small, cut) == (bounds.small, bounds.cut)


@on_gpu
def test_capture_on_a_stream_of_its_own(backend):
    """As PyTorch's documentation has it: warmed up on one stream, captured on another, which knows no descriptors."""
    step = Step(FORMS["mixed"], "cuda", backend)
    step.fill(5)
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed in range(8):
        step.fill(seed)
        step.poison()
        graph.replay()
        want = step.eager()
        assert torch.equal(step.out, want[0]) and torch.equal(step.lse, want[1]), f"seed {seed}"


@on_gpu
@pytest.mark.parametrize("name", ["decodes", "decodes, dense", "mixed", "one prompt", "short"])
def test_planning_inside_the_call_replays(backend, name):
    """`attend` in a graph: its plan, or its counters, live in the graph's own memory."""
    bounds = FORMS[name]
    step = Step(bounds, "cuda", backend)
    step.fill(5)
    results = []

    def call():
        results[:] = octavo.attend(step.q, step.kv, step.batch, causal=bounds.causal, backend=backend)

    graph = captured(call)
    out, lse = results
    for seed in range(12):
        step.fill(seed)
        out.fill_(math.nan)
        lse.fill_(math.nan)
        for _ in range(2):
            graph.replay()
        want = octavo.attend(step.q, step.kv, step.batch, causal=bounds.causal, backend=backend)
        assert torch.equal(out, want[0]) and torch.equal(lse, want[1]), f"seed {seed}"
        step.check(out, lse)


@on_gpu
def test_two_graphs_of_one_workspace_and_many_layers(backend):
    """As engines have it: a graph for each number of sequences, one plan a step, several layers with caches of their
    own; graphs are replayed in turn."""
    many = Step(FORMS["mixed"], "cuda", backend)
    layers = [PagedKV.combined(torch.empty_like(many.cache)) for _ in range(3)]
    few = 5
    part = PagedBatch.csr(many.batch.qo_indptr[: few + 1], many.batch.kv_indptr[: few + 1], many.batch.page_table,
                          many.batch.last_page_len[:few])  # fmt: skip
    outs = [(torch.empty_like(many.out), torch.empty_like(many.lse)) for _ in layers]

    def step_over(batch):
        def call():
            many.attention.plan(batch)
            for kv, (out, lse) in zip(layers, outs, strict=True):
                many.attention.run(many.q, kv, out=out, lse=lse)

        return call

    many.fill(5)
    graphs = [(many.batch, captured(step_over(many.batch))), (part, captured(step_over(part)))]
    for seed in range(8):
        many.fill(seed)
        for i, kv in enumerate(layers):
            kv.k_cache.copy_(many.kv.k_cache * (i + 1))
            kv.v_cache.copy_(many.kv.v_cache + i)
        for batch, graph in graphs:
            many.poison()
            for out, lse in outs:
                out.fill_(math.nan), lse.fill_(math.nan)
            graph.replay()
            fresh = many.new_attention()
            fresh.plan(batch)
            for kv, (out, lse) in zip(layers, outs, strict=True):
                want = fresh.run(many.q, kv)
                assert torch.equal(out, want[0]) and torch.equal(lse, want[1]), f"seed {seed}"
                rows = sample_rows(many.spec, batch, len(many.q), max_rows=8, max_keys=20_000)
                assert_matches(Problem(many.spec, many.q, kv, batch), out, lse, rows)


@pytest.fixture
def plain_functions(monkeypatch):
    """Dynamo cannot trace jaxtyping's checks, which tests put on these."""
    for name in ("pack_batch", "is_traced"):
        monkeypatch.setattr(ops, name, inspect.unwrap(getattr(ops, name)))
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@on_gpu
@pytest.mark.parametrize("name", ["decodes", "mixed", "one prompt"])
def test_reduce_overhead_is_eager(backend, name, plain_functions):
    """torch.compile with CUDA graphs of its own: recorded at the second call, replayed from then on."""
    from torch._dynamo.utils import counters

    bounds = FORMS[name]
    step = Step(bounds, "cuda", backend)
    b = step.batch

    def layer(q, k_cache, v_cache, qo_indptr, kv_indptr, page_table, last_page_len):
        batch = PagedBatch.csr(qo_indptr, kv_indptr, page_table, last_page_len)
        out, lse = octavo.attend(q * 0.5, PagedKV(k_cache, v_cache), batch, backend=backend)
        return out * 2, lse

    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    inputs = (step.q, step.kv.k_cache, step.kv.v_cache, b.qo_indptr, b.kv_indptr, b.page_table, b.last_page_len)
    skips = counters["inductor"]["cudagraph_skips"]
    with torch.no_grad():
        for seed in range(12):
            step.fill(seed)
            torch.compiler.cudagraph_mark_step_begin()
            got = [x.clone() for x in compiled(*inputs)]
            want = layer(*inputs)
            assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1]), f"seed {seed}"
            assert not got[1].isnan().any()
    assert counters["inductor"]["cudagraph_skips"] == skips, "run without a CUDA graph"


@on_gpu
def test_reduce_overhead_over_a_plan_is_eager(backend, plain_functions):
    """The plan is made outside, as an engine does; the compiled layer attends under it."""
    step = Step(FORMS["mixed"], "cuda", backend)
    step.fill(5)
    step()

    def layer(q, k_cache, v_cache):
        out, lse = step.attention.run(q, PagedKV(k_cache, v_cache))
        return out * 2, lse

    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for seed in range(8):
            step.fill(seed)
            step.attention.plan(step.batch)
            torch.compiler.cudagraph_mark_step_begin()
            got = [x.clone() for x in compiled(step.q, step.kv.k_cache, step.kv.v_cache)]
            want = step.eager()
            assert torch.equal(got[0], want[0] * 2) and torch.equal(got[1], want[1]), f"seed {seed}"
