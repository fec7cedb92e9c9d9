"""Variants in the portable kernels against the oracle: small under Triton's interpreter, longer on a GPU."""

import os
from dataclasses import replace

import pytest
import torch
from inputs import BF16, FP16, FP32, Case, build
from test_planner import csr, plan_on_device, shapes_of, strip

from octavo.backends import AttentionCall
from octavo.backends.base import Extras
from octavo.backends.portable import Tuning
from octavo.backends.triton import TritonBackend
from octavo.planning.form import PlanForm, SplitChoice
from octavo.planning.schedule import first_visible, schedule, visible_keys
from octavo.planning.split import SplitConfig
from octavo.problem import AttentionSpec
from octavo.reference import reference, sequence_lengths

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
runs = pytest.mark.skipif(not INTERPRETED and DEVICE == "cpu", reason="needs a GPU or TRITON_INTERPRET=1")

SHORT = SplitConfig(key_block=16, min_blocks=1, by_area=False)
EAGER = Tuning(SplitChoice(SHORT, SplitConfig(key_block=16, min_blocks=1), 32))
BACKEND = TritonBackend(EAGER)

VARIANTS = {
    "window": {"window_left": 9},
    "own key alone": {"window_left": 0},
    "band": {"causal": False, "window_left": 9, "window_right": 5},
    "left, full": {"causal": False, "window_left": 9},
    "right": {"causal": False, "window_right": 3},
    "soft-cap": {"logits_soft_cap": 2.0},
    "sinks": {"sinks": True},
    "alibi": {"alibi": True},
    "mask": {"custom_mask": True},
    "all": {"window_left": 20, "logits_soft_cap": 3.0, "sinks": True, "alibi": True, "custom_mask": True},
}
FORMS = {"inline": None, "small": PlanForm(16, 0, 12, 0), "both": PlanForm(64, 16, 12, 12)}


def extras_of(spec, k_scale=None, v_scale=None):
    generator = torch.Generator().manual_seed(3)
    sinks = torch.randn(spec.num_qo_heads, generator=generator).to(DEVICE) if spec.sinks else None
    slopes = torch.rand(spec.num_qo_heads, generator=generator).to(DEVICE) * 0.2 if spec.alibi else None
    return Extras(sinks, slopes, k_scale, v_scale)


def masked(problem, spec, packed):
    """The batch with random masks, of which some rows see nothing."""
    generator = torch.Generator().manual_seed(4)
    masks = []
    for q_len, kv_len in zip(*sequence_lengths(problem.batch.to("cpu"), spec.page_size), strict=True):
        mask = torch.rand(q_len, kv_len, generator=generator) < 0.6
        mask[:1] &= q_len == 1
        masks.append(mask.flatten())
    if packed:
        masks = [torch.nn.functional.pad(m, (0, -len(m) % 8)).view(-1, 8).int() for m in masks]
        masks = [(m << torch.arange(8)).sum(1).to(torch.uint8) for m in masks]
    return problem.batch.with_mask(torch.cat(masks).to(DEVICE)).with_mask_indptr(spec.page_size)


def attend(spec, problem, batch, extras, form):
    q, kv = problem.q, problem.kv
    out = q.new_full((*q.shape[:2], spec.v_dim), float("nan"))
    lse = torch.full(q.shape[:2], float("nan"), device=q.device)
    plan = None
    if form is not None:
        words = BACKEND.plan_words(spec, q.shape[0], batch.num_sequences, form)
        plan = torch.full((words,), float("nan"), device=q.device).view(torch.int32)
        BACKEND.plan(spec, batch, q.shape[0], form, plan)
    form = form or PlanForm(16, 0, 12, 0)
    call = AttentionCall(spec, batch, q, kv.k_cache, kv.v_cache, out, lse, spec.default_scale, None, plan, form, extras)
    BACKEND.attend(call)
    return out, lse


def assert_close(spec, problem, batch, extras, out, lse):
    """Within a rounding of p and out of the oracle; rows that see nothing exactly."""
    values = dict(zip(("sinks", "alibi_slopes", "k_scale", "v_scale"), extras, strict=True))
    exact = reference(spec, problem.q, problem.kv.k_cache, problem.kv.v_cache, batch, **values)
    eps = torch.finfo(spec.dtype).eps
    torch.testing.assert_close(lse.cpu().double(), exact[1], rtol=2e-6, atol=2e-5)
    torch.testing.assert_close(out.cpu().double(), exact[0], rtol=2 * eps, atol=max(2 * eps, 1e-6) * 4)


def check(case, variant, form, packed=False, k_scale=None, v_scale=None):
    problem = build(case, DEVICE)
    spec = replace(problem.spec, **variant)
    batch = masked(problem, spec, packed) if spec.custom_mask else problem.batch
    extras = extras_of(spec, k_scale, v_scale)
    assert_close(spec, problem, batch, extras, *attend(spec, problem, batch, extras, form))


MIXED = Case("mixed", (20, 1, 2, 3), (50, 70, 3, 0), heads=(4, 2), dims=(16, 32), page_size=4, dtype=FP16)


@pytest.mark.interpreter
@runs
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_variant_is_the_oracles(variant, form):
    check(MIXED, variant, form)


@pytest.mark.interpreter
@runs
@pytest.mark.parametrize("variant", ({"custom_mask": True}, {"custom_mask": True, "window_left": 7}), ids=str)
def test_packed_masks(variant):
    check(replace(MIXED, dtype=FP32), variant, FORMS["both"], packed=True)


@pytest.mark.interpreter
@runs
@pytest.mark.parametrize("kv_dtype", (torch.float8_e4m3fn, torch.float8_e5m2), ids=str)
@pytest.mark.parametrize("k_scale", (0.5, -2.0, torch.tensor(0.7), torch.tensor([0.5, 1.5])), ids=str)
def test_fp8(kv_dtype, k_scale):
    problem = build(MIXED, DEVICE)
    spec = replace(problem.spec, kv_dtype=kv_dtype)
    kv = replace(problem.kv, k_cache=problem.kv.k_cache.to(kv_dtype), v_cache=problem.kv.v_cache.to(kv_dtype))
    scale = k_scale.to(DEVICE) if isinstance(k_scale, torch.Tensor) else k_scale
    extras = extras_of(spec, scale, scale)
    problem = problem.with_(kv=kv)
    assert_close(spec, problem, problem.batch, extras, *attend(spec, problem, problem.batch, extras, FORMS["small"]))


LONG = Case("long", (300, 1, 40, 1), (1500, 4000, 700, 90), heads=(8, 2), dims=(128, 128), page_size=16, dtype=BF16)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("form", (None, PlanForm(16, 0, 40, 0), PlanForm(128, 16, 40, 40)), ids=str)
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_longer_on_a_gpu(variant, form):
    scaled = {name: 30 * value if name.startswith("window") else value for name, value in variant.items()}
    check(LONG, scaled, form)
    check(replace(LONG, dims=(64, 128), page_size=1, dtype=FP16), scaled, form, packed=True)


WINDOWS = (
    {"window_left": 9},
    {"causal": False, "window_left": 4, "window_right": 6},
    {"causal": False, "window_left": 40},
)
BATCH = [(5, 140), (0, 7), (3, 0), (20, 12), (1, 1), (1, 299), (70, 90)]
FORMS_OF_PLANS = (PlanForm(16, 0, 9, 0), PlanForm(64, 16, 12, 40), PlanForm(64, 16, 1, 1, batch_invariant=1))


@pytest.mark.interpreter
@runs
@pytest.mark.parametrize("form", FORMS_OF_PLANS, ids=str)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_windowed_plan_equals_model(window, form):
    spec = AttentionSpec(14, 2, head_dim=16, **window)
    tokens = sum(q for q, _ in BATCH) + 5
    got = plan_on_device(spec, csr(BATCH, 1, torch.int32), tokens, form, EAGER.split)
    lists = schedule(spec, shapes_of(BATCH, padding=5), EAGER.config(form))
    assert [strip(x, len(BATCH)) for x in got] == [strip(x, len(BATCH)) for x in lists.main + lists.small]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("form", FORMS_OF_PLANS, ids=str)
def test_windowed_items_hold_what_rows_see_and_little_else(window, form):
    """Every key that a row sees is in one item of its tile; keys that no row of the tile sees are in none."""
    spec = AttentionSpec(14, 2, head_dim=16, **window)
    shapes = shapes_of(BATCH)
    lists = schedule(spec, shapes, EAGER.config(form))
    held = {}
    for item in lists.main + lists.small:
        if item.row_count:
            tile = held.setdefault((item.sequence, item.kv_head, item.row_begin, item.row_count), [])
            tile += range(item.key_begin, item.key_end)
    for (sequence, _, row, count), keys in held.items():
        shape = shapes[sequence]
        last = min((row + count - 1) // spec.group_size, shape.q_len - 1)
        tokens = range(row // spec.group_size, last + 1)
        seen = [range(first_visible(spec, shape, t), visible_keys(spec, shape, t)) for t in tokens]
        assert keys == sorted(set(keys))
        assert {k for r in seen for k in r} == set(keys)


def test_split_limits_count_keys_within_the_window():
    """A window of 4k over 128k keys is cut as 4k keys are."""
    spec = AttentionSpec(32, 4, 128, window_left=4095)
    form = PlanForm(16, 0, 264, 0)
    config = TritonBackend().tuning.config(form)
    long, short = (schedule(spec, shapes_of([(1, n)]), config).main for n in (1 << 17, 4096))
    assert [x.key_end - x.key_begin for x in long] == [x.key_end - x.key_begin for x in short]
