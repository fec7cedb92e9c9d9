"""Keys of a tile cut into parts, their states combined by whichever program ends last: on small shapes, with parts as
short as can be."""

import itertools
import os
import random
import re

import pytest
import torch
from inputs import FP16, FP32, I64, Case, build
from tolerance import assert_matches

from octavo import BatchAttention, PagedBatch, work_item
from octavo.backends import AttentionCall, arch_of
from octavo.backends.portable import SCRATCH, Tuning
from octavo.backends.triton import TritonBackend
from octavo.planning.form import PlanForm, SplitChoice, layout_of
from octavo.planning.split import SplitConfig

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(not INTERPRETED and DEVICE == "cpu", reason="needs a GPU or TRITON_INTERPRET=1"),
]

SHORT = SplitConfig(key_block=16, min_blocks=1, by_area=False)
EAGER = Tuning(SplitChoice(SHORT, SplitConfig(key_block=16, min_blocks=1), 32))
BACKEND = TritonBackend(EAGER)

CASES = {
    "one decode": Case("1", (1,), (300,), heads=(8, 1), dims=(32, 32), dtype=FP16),
    "decodes": Case("n", (1, 1, 0, 1), (70, 200, 9, 1), heads=(4, 2), dims=(32, 16), dtype=FP16),
    "mixed": Case("mixed", (20, 1, 2, 1), (50, 90, 3, 0), heads=(4, 2), dims=(32, 32), page_size=4, dtype=FP16),
    "rows without keys": Case("dead", (30, 5), (20, 2), heads=(6, 2), dims=(16, 16), dtype=FP32),
    "dense, full": Case("full", (9, 1), (50, 64), dims=(16, 16), page_size=8, causal=False, dense=True, dtype=FP16),
    "odd group": Case("odd", (3, 1), (60, 50), heads=(7, 1), dims=(40, 24), index_dtypes=(I64,) * 4, dtype=FP16),
}
FORMS = (
    PlanForm(16, 0, 12, 0),
    PlanForm(64, 16, 12, 12),
    PlanForm(128, 16, 0, 3),
    PlanForm(64, 16, 4, 4, batch_invariant=1),
    PlanForm(16, 0, 4, 0, batch_invariant=1),
)


def call_of(problem, plan=None, form=None):
    """A call whose outputs hold NaN."""
    q, spec, kv = problem.q, problem.spec, problem.kv
    out = q.new_full((*q.shape[:2], spec.v_dim), float("nan"))
    lse = torch.full(q.shape[:2], float("nan"), device=q.device)
    scale = spec.default_scale if problem.sm_scale is None else problem.sm_scale
    return AttentionCall(spec, problem.batch, q, kv.k_cache, kv.v_cache, out, lse, float(scale), None, plan, form)


def poisoned_plan(problem, form):
    """A plan whose partial states, and all else that the planner leaves alone, are NaN."""
    words = BACKEND.plan_words(problem.spec, problem.q.shape[0], problem.batch.num_sequences, form)
    plan = torch.full((words,), float("nan"), device=problem.q.device).view(torch.int32)
    BACKEND.plan(problem.spec, problem.batch, problem.q.shape[0], form, plan)
    return plan


def num_parts(problem, plan, form):
    """Items that are one of several parts, in both lists."""
    capacity = layout_of(problem.spec, plan.numel(), EAGER.config(form)).capacity
    items = plan[work_item.HEADER_WORDS :][: capacity * work_item.ITEM_WORDS].view(capacity, -1)
    main, small = int(plan[work_item.NUM_ITEMS]), int(plan[work_item.NUM_SMALL_ITEMS])
    written = torch.cat([items[:main], items[capacity - small :]])
    return int((written[:, work_item.NUM_SPLITS] > 1).sum())


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_parts_combine_to_the_whole(case, form):
    problem = build(case, DEVICE)
    plan = poisoned_plan(problem, form)
    assert num_parts(problem, plan, form) > 0 or case is CASES["rows without keys"]
    first = call_of(problem, plan, form)
    BACKEND.attend(first)
    assert_matches(problem, first.out, first.lse)
    # The plan serves every layer: the counters must be back where they were.
    second = call_of(problem, plan, form)
    BACKEND.attend(second)
    assert torch.equal(first.out, second.out) and torch.equal(first.lse, second.lse)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_planning_inside_is_planning_before(case):
    problem = build(case, DEVICE)
    form = PlanForm(16, 0, 12, 0)
    planned = call_of(problem, poisoned_plan(problem, form), form)
    BACKEND.attend(planned)
    for _ in range(2):
        inside = call_of(problem, None, form)
        BACKEND.attend(inside)
        assert_matches(problem, inside.out, inside.lse)
        assert torch.equal(inside.out, planned.out) and torch.equal(inside.lse, planned.lse)
    assert not SCRATCH.take(1, 1, torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device("cpu"))[1].any()


def alone(problem, case, sequence, cumulative):
    """The sequence-th sequence of a problem as a batch of its own, over the same cache."""
    first, last = cumulative[sequence], cumulative[sequence + 1]
    b = problem.batch
    pages = slice(int(b.kv_indptr[sequence]), int(b.kv_indptr[sequence + 1]))
    ends = torch.tensor([0, pages.stop - pages.start], dtype=b.kv_indptr.dtype, device=DEVICE)
    starts = torch.tensor([0, last - first], dtype=b.qo_indptr.dtype, device=DEVICE)
    batch = PagedBatch.csr(starts, ends, b.page_table[pages].clone(), b.last_page_len[sequence : sequence + 1])
    return problem.with_(q=problem.q[first:last], batch=batch)


@pytest.mark.parametrize("seed", range(3))
def test_invariant_results_do_not_depend_on_neighbours(seed):
    """To the bit: each sequence alone, and in a batch of others, some of which would change its tiles or cuts."""
    rng = random.Random(seed)
    qo_lens = tuple(rng.choice([1, 1, 2, 30]) for _ in range(5))
    kv_lens = tuple(q + rng.choice([0, 5, 60, 120]) for q in qo_lens)
    case = Case("n", qo_lens, kv_lens, heads=(8, 2), dims=(32, 32), page_size=2, padding=0, dtype=FP16, seed=seed)
    problem = build(case, DEVICE)
    arch, cumulative = arch_of(torch.device(DEVICE)), [0, *itertools.accumulate(qo_lens)]

    def attend(p):
        form = BACKEND.plan_form(p.spec, p.q.shape[0], p.batch, arch, batch_invariant=True)
        call = call_of(p, None, form)
        BACKEND.attend(call)
        return call.out, call.lse

    together = attend(problem)
    assert_matches(problem, *together)
    for i in range(len(qo_lens)):
        rows = slice(cumulative[i], cumulative[i + 1])
        for got, want in zip(attend(alone(problem, case, i, cumulative)), together, strict=True):
            assert torch.equal(got, want[rows])


def test_batches_that_can_not_be_cut_take_no_workspace():
    backend, arch = TritonBackend(), arch_of(torch.device(DEVICE))
    problem = build(Case("short", (1, 1), (20, 30), dtype=FP16), DEVICE)
    form = backend.plan_form(problem.spec, 2, problem.batch, arch)
    assert not backend.tuning.config(form).split.cuts
    assert backend.plan_words(problem.spec, 2, 2, form) < 1000


def test_explain_reads_the_plan_back():
    """What is in the workspace, from which the picture's tests go on."""
    problem = build(Case("n", (40, 1, 2), (20, 9, 0), heads=(8, 2), dims=(32, 32), padding=0, dtype=FP16), DEVICE)
    attention = BatchAttention(problem.spec, device=DEVICE, backend="triton")
    assert "items" not in attention.explain()
    attention.plan(problem.batch, num_tokens=43)
    dead = 8 * (20 + 2)
    assert f"rows      {8 * 43} (token, query head), {100 * dead / (8 * 43):.1f} % see no key" in attention.explain()
    assert re.search(r"^main +\d+ items of \d+ rows", attention.explain(), re.MULTILINE)
