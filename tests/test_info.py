"""`octavo info --batch`, and the picture of a schedule that it and `explain()` show."""

import json
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from test_workloads import INDICES, ROW, write_trace
from typer.testing import CliRunner

from octavo import AttentionSpec
from octavo.backends.triton import TritonBackend
from octavo.bench.schedule_picture import COLOURS, MOST_BARS, STORES, schedule_chart
from octavo.bench.schedules import sequence_shapes
from octavo.bench.workloads import Workload
from octavo.cli.app import app
from octavo.planning.form import DEFAULT_SPLIT, PlanForm, schedule_config
from octavo.planning.picture import Machine, describe, picture
from octavo.planning.readback import explain_plan, items_end, read_plan
from octavo.planning.schedule import schedule
from octavo.problem import Arch
from octavo.work_item import HEADER_WORDS, ITEM_WORDS, NUM_ITEMS, NUM_SMALL_ITEMS

SPEC = AttentionSpec(32, 4, 128)
PREFILL, DECODE = PlanForm(128, 0, 132, 0), PlanForm(16, 0, 264, 0)
MIXED = PlanForm(128, 16, 132, 264)


def drawn(q_lens, kv_lens, form, spec=SPEC):
    w = Workload("w", tuple(q_lens), tuple(kv_lens))
    items = schedule(spec, sequence_shapes(w, spec), schedule_config(form, DEFAULT_SPLIT))
    return picture(spec, items, form, Machine.h200(spec))


# us, without planning, of one H200 in the recorded run 20261201T112312.
RECORDED = [
    (((16384,), (16384,)), PREFILL, 3174.8),
    (((4096,), (4096,)), PREFILL, 227.8),
    (((1024,) * 8, (4096,) * 8), PREFILL, 726.1),
    (((128,) * 16, (8192,) * 16), PREFILL, 420.2),
    (((512,), (8192,)), PREFILL, 113.0),
    (((2048,), (32768,)), PREFILL, 1530.2),
    (((1,) * 64, (4096,) * 64), DECODE, 143.8),
]


@pytest.mark.parametrize(("lengths", "form", "recorded"), RECORDED)
def test_predictions_are_near_what_was_measured(lengths, form, recorded):
    assert drawn(*lengths, form).seconds * 1e6 == pytest.approx(recorded, rel=0.1)


sizes = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 3000)), min_size=1, max_size=12)


@settings(deadline=None, max_examples=100)
@given(sizes, st.sampled_from([PREFILL, DECODE, MIXED]), st.booleans())
def test_every_item_runs_once_and_workers_do_one_thing_at_a_time(pairs, form, causal):
    spec = AttentionSpec(8, 2, 64, causal=causal)
    w = Workload("w", *(tuple(x) for x in zip(*pairs, strict=True)))
    items = schedule(spec, sequence_shapes(w, spec), schedule_config(form, DEFAULT_SPLIT))
    seen = picture(spec, items, form, Machine.h200(spec))
    assert [s.item for one in seen.lists for s in one.spans] == [x for x in items.main + items.small if x.row_count]
    clock = 0.0
    for one in seen.lists:
        assert one.begin == clock and 0 < one.busy <= 1
        free = {}
        for span in sorted(one.spans, key=lambda s: s.begin):
            assert free.get(span.worker, one.begin) <= span.begin < span.end <= one.end
            free[span.worker] = span.end
        assert max(free, default=0) < one.workers
        clock = one.end
    assert seen.seconds >= max(clock, seen.bound_seconds)
    assert seen.flops == w.flops(spec) and seen.bytes == w.bytes(spec)
    dead = sum(q if not kv else max(q - kv, 0) if causal else 0 for q, kv in pairs)
    assert (seen.rows, seen.dead_rows) == (8 * w.num_tokens, 8 * dead)


def test_text_says_items_cuts_balance_dead_rows_and_roofline():
    text = "\n".join(describe(drawn([300, 1, 2000], [700, 9000, 3], MIXED)))
    main, small = drawn([300, 1, 2000], [700, 9000, 3], MIXED).lists
    assert f"main      {len(main.spans)} items of 128 rows, {main.storing} only store" in text
    assert f"{small.cut_tiles} tiles cut into {small.parts} parts" in text and small.cut_tiles == 4
    assert f"rows      {2301 * 32} (token, query head), {100 * 1997 / 2301:.1f} % see no key" in text
    assert f"longest item {small.longest_keys} keys" in text and "bound by memory" in text
    untimed = "\n".join(describe(drawn([300], [700], PREFILL), rates_known=False))
    assert "predicted" not in untimed and "main  " in untimed


def test_precise_products_take_longer():
    half, precise = (
        drawn([4096], [4096], PREFILL, AttentionSpec(8, 1, 128, dtype=d)) for d in (torch.half, torch.float)
    )
    assert precise.bound_seconds == pytest.approx(6 * half.bound_seconds)


@pytest.mark.parametrize("pairs", [[(1, 1)], [(300, 700), (1, 9000), (0, 5), (2, 3)], [(4000, 3), (1, 300)]])
def test_a_plan_reads_back_as_the_model(pairs):
    """Written here word for word as octavo/work_item.py has it; the kernel's plans are in test_planner.py."""
    w = Workload("w", *(tuple(x) for x in zip(*pairs, strict=True)))
    config = schedule_config(MIXED, DEFAULT_SPLIT)
    want = schedule(SPEC, sequence_shapes(w, SPEC), config)
    words = TritonBackend().plan_words(SPEC, w.num_tokens, len(pairs), MIXED)
    end = items_end(SPEC, words, config)
    plan = torch.full((end,), -1, dtype=torch.int32)
    plan[NUM_ITEMS], plan[NUM_SMALL_ITEMS] = len(want.main), len(want.small)
    places = plan[HEADER_WORDS:].view(-1, ITEM_WORDS)
    position = 0x1_8000_0005  # past 32 bits, the low half negative as an int32
    numbers = [*range(len(want.main)), *(len(places) - 1 - i for i in range(len(want.small)))]
    for place, item in zip((places[i] for i in numbers), want.main + want.small, strict=True):
        fields = list(vars(item).values())
        place[:] = torch.tensor([*fields[:3], 5 - 2**31, 1, *fields[4:], 0])
    got = read_plan(plan)
    for name in ("main", "small"):
        listed = [{**vars(x), "page_position": position} for x in getattr(want, name)]
        assert [vars(x) for x in getattr(got, name)] == listed


@pytest.mark.parametrize(("name", "timed"), [("NVIDIA H200", True), ("NVIDIA A100", False)])
def test_a_plan_in_a_workspace_is_explained(name, timed):
    """Only the items are read of it; times are left out where the device's rates are not known."""
    form = PlanForm(16, 0, 264, 0)
    words = TritonBackend().plan_words(SPEC, 2, 1, form)
    plan = torch.full((words,), -1, dtype=torch.int32)
    want = schedule(
        SPEC, sequence_shapes(Workload("w", (1,), (9000,)), SPEC), schedule_config(form, DEFAULT_SPLIT)
    ).main
    plan[NUM_ITEMS], plan[NUM_SMALL_ITEMS] = len(want), 0
    for place, item in zip(plan[HEADER_WORDS:].split(ITEM_WORDS), want, strict=False):
        fields = list(vars(item).values())
        place[:] = torch.tensor([*fields[:4], 0, *fields[4:], 0])
    lines = explain_plan(SPEC, plan, form, Arch("cuda", (9, 0), 132, name))
    assert lines == list(describe(drawn([1], [9000], form), rates_known=timed))
    assert any("tiles cut into" in line for line in lines) and any("predicted" in line for line in lines) == timed


def rects(svg):
    root = ElementTree.fromstring(svg)
    return [x for x in root.iter() if x.tag.endswith("rect") and x.get("x")]


def test_picture_has_a_bar_for_each_item():
    seen = drawn([300, 1, 2000], [700, 9000, 3], MIXED)
    bars = rects(schedule_chart(seen, "a <batch> & more"))
    assert len(bars) <= sum(len(one.spans) for one in seen.lists)
    assert {bar.get("fill") for bar in bars} == {STORES, *COLOURS[:3]}
    tips = [bar[0].text for bar in bars]
    assert any("sequence 1, K/V head 3" in tip and "part 1 of" in tip for tip in tips)
    for bar in bars:
        assert 0 <= float(bar.get("x")) <= 960 and float(bar.get("width")) > 0 and float(bar.get("height")) > 0


def test_picture_of_many_short_items_stays_small():
    svg = schedule_chart(drawn([1] * 5000, [16] * 5000, DECODE), "many")
    assert len(rects(svg)) < MOST_BARS + 264 and len(svg) < 4_000_000


# The command


@pytest.fixture
def info(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = tmp_path / "batches.jsonl"
    rows = [{"name": "mixed", "qo_lens": [600, 1, 1], "kv_lens": [9000, 4000, 50]}, {"qo_lens": [7], "kv_lens": [3]}]
    path.write_text("\n".join(json.dumps(row) for row in rows))

    def call(*arguments):
        return CliRunner().invoke(app, ["info", "--batch", str(path), "--backend", "triton", *map(str, arguments)])

    return call


def test_info_shows_the_schedule_of_each_batch(info):
    result = info()
    assert result.exit_code == 0, result.output
    for said in ("mixed: 3 sequences, 602 tokens, 13050 keys", "batches:2: 1 sequences", "132 SMs", "roofline"):
        assert said in result.stdout
    assert result.stdout.count("predicted") == 2


def test_info_plans_for_the_shapes_and_sms_given(info):
    result = info("--qo-heads", 8, "--kv-heads", 8, "--head-dim", 64, "--page-size", 16, "--sms", 10, "--limit", 1)
    assert result.exit_code == 0, result.output
    assert f"{602 * 8} (token, query head)" in result.stdout and "10 SMs" in result.stdout
    assert "batches:2" not in result.stdout
    assert "keys cut by length alone" in info("--batch-invariant").stdout
    assert info("--sms", 10).stdout != info("--sms", 20).stdout


def test_info_draws_each_batch(info, tmp_path):
    assert info("--plot", tmp_path / "p.svg").exit_code == 0
    assert rects((tmp_path / "p-1.svg").read_text()) and rects((tmp_path / "p-2.svg").read_text())
    assert info("--plot", tmp_path / "one.svg", "--limit", 1).exit_code == 0
    assert rects((tmp_path / "one.svg").read_text())


def test_info_takes_the_sm_90_kernels_tiles_where_they_serve(info, monkeypatch):
    monkeypatch.setattr("octavo.backends.hopper.compile_failure", lambda spec: None)
    assert "hopper on NVIDIA H200" in info("--backend", "hopper").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "nowhere.jsonl"], "nowhere.jsonl: expected a file"),
        (["--sms", "4"], "--batch: expected a file of batches"),
        (["--batch", "FILE", "--backend", "cpu"], "--backend: expected one of hopper, triton"),
        (["--batch", "FILE", "--kv-heads", "5"], "num_qo_heads: expected a multiple"),
        (["--batch", "FILE", "--plot", "no/such/folder/p.svg"], "fix: check the path"),
    ],
)
def test_info_says_what_is_wrong(arguments, message, tmp_path):
    path = tmp_path / "b.jsonl"
    path.write_text('{"qo_lens": [1], "kv_lens": [2]}')
    result = CliRunner().invoke(app, ["info", *(str(path) if a == "FILE" else a for a in arguments)])
    assert result.exit_code == 2 and message in result.output


def test_info_reads_traces(tmp_path):
    write_trace(tmp_path / "trace", rows=[ROW, ROW | {"uuid": "fedcba98"}])
    save_file(INDICES, tmp_path / "trace" / "blob.safetensors")
    result = CliRunner().invoke(app, ["info", "--batch", str(tmp_path / "trace"), "--backend", "triton"])
    assert result.exit_code == 0, result.output
    assert "fedcba98" in result.stdout and result.stdout.count("roofline ") == 2
