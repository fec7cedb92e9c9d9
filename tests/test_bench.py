"""The benchmark's parts: problems by name, interleaved measurement, results on disk, implementations by import."""

import json
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import octavo
from octavo.bench import results
from octavo.bench.estimate import estimate
from octavo.bench.gate import Gate
from octavo.bench.implementations import DEFAULT, RECORDED, Prepared, Unsupported, find, torch_extra
from octavo.bench.implementations.base import require_plain
from octavo.bench.measure import MAX_REPS, MIN_REPS, CudaClock, Spread, Subject, interleave
from octavo.bench.problems import (
    ROWS,
    SETS,
    SPEC,
    Problem,
    named,
    parse_case,
    problem_set,
    select,
    spec_as_json,
    spec_from_json,
)
from octavo.bench.results import Context
from octavo.bench.worker import PEERS_LSE_SLACK, _Case
from octavo.bench.workloads import Inputs, Workload, make_inputs
from octavo.problem import AttentionSpec
from octavo.reference import reference

CONTEXT = Context("r1", "abc", "a card", {"octavo": "0"}, {"tflops": 800.0, "gbps": 4000.0})


def test_names_say_what_they_hold() -> None:
    assert parse_case("8x1k/4k").qo_lens == (1024,) * 8
    assert parse_case("8x1k/4k").kv_lens == (4096,) * 8
    assert parse_case("dead 12383/1").qo_lens == (12383,)
    mixed = parse_case("64x1..64/1k..8k")
    assert mixed == parse_case("64x1..64/1k..8k") and len(set(mixed.kv_lens)) > 32
    assert all(1 <= n <= 64 for n in mixed.qo_lens) and all(1024 <= n <= 8192 for n in mixed.kv_lens)


@pytest.mark.parametrize("name", ["", "8x1k", "x1/2", "1k/4g", "8x1k/4k extra", "-1/4"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"expected .*got .*fix:"):
        parse_case(name)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", SETS)
def test_sets_hold_distinct_problems_that_survive_json(name: str, device: str) -> None:
    for quick in (False, True):
        problems = problem_set(name, SPEC, device=device, quick=quick)
        assert len({(p.name, p.scattered) for p in problems}) == len(problems) >= 2
        for problem in problems:
            again = Problem.from_json(json.loads(json.dumps(problem.as_json())))
            assert again.spec == problem.spec and again.workload.kv_lens == problem.workload.kv_lens


def test_specs_without_variants_can_be_read_by_a_revision_that_has_none() -> None:
    plain = {"num_qo_heads", "num_kv_heads", "head_dim", "value_dim", "page_size", "causal", "dtype"}
    assert set(spec_as_json(SPEC)) == plain
    variant = AttentionSpec(4, 2, 32, window_left=7, kv_dtype=torch.float8_e4m3fn)
    row = json.loads(json.dumps(spec_as_json(variant)))
    assert set(row) == plain | {"window_left", "kv_dtype"} and spec_from_json(row) == variant


def test_sweeps_vary_what_they_say() -> None:
    assert {p.spec.page_size for p in problem_set("page", SPEC)} >= {1, 16, 128}
    assert {p.spec.head_dim for p in problem_set("dim", SPEC)} >= {64, 80, 192, 256}
    assert {p.spec.group_size for p in problem_set("heads", SPEC)} >= {1, 8, 16}
    batches = [len(p.workload.qo_lens) for p in problem_set("batch", SPEC)]
    assert min(batches) == 1 and max(batches) == 4096 and len(set(batches)) >= 8
    keys = {p.workload.kv_lens[0] for p in problem_set("context", SPEC)}
    assert min(keys) == 1024 and max(keys) == 1 << 20
    assert {p.pages for p in problem_set("order", SPEC)} == {"scattered", "consecutive"}


def test_filter_finds_by_regular_expression() -> None:
    assert [p.name for p in select(named(ROWS, SPEC), "^decode (16|64)x")] == ["decode 16x1/4k", "decode 64x1/4k"]
    both = problem_set("order", SPEC)
    assert select([*both, *both]) == both


class _FakeClock:
    """Calls take what they say; the order in which they were timed is kept."""

    def __init__(self) -> None:
        self.timed: list[float] = []

    def span(self, call: Callable[[], object], lead_us: float) -> float:
        took = self.host(call)
        self.timed.append(took)
        return took

    def wall(self, call: Callable[[], object]) -> float:
        return self.host(call)

    def host(self, call: Callable[[], object]) -> float:
        took = call()
        assert isinstance(took, float)
        return took

    def synchronize(self) -> None: ...


def test_subjects_take_turns() -> None:
    clock = _FakeClock()
    spreads = interleave([Subject("a", "us", lambda: 10.0, 0.1), Subject("b", "us", lambda: 20.0, 0.1)], clock)
    assert spreads["a", "us"] == Spread(10.0, 10.0, 10.0, MAX_REPS)
    assert clock.timed[-8:] == [10.0, 20.0] * 4


@pytest.mark.parametrize("plans", [True, False])
def test_figures_of_an_implementation_share_its_seconds(plans: bool) -> None:
    case = object.__new__(_Case)
    case.seconds, case.budget, case.device = 0.25, 2.0, torch.device("cpu")
    nothing = (lambda: None) if plans else None
    prepared = Prepared(run=lambda: None, plan=nothing, plan_on_device=plans, call=nothing)
    subjects = list(case._subjects("octavo", prepared))
    assert {s.column for s in subjects} == ({"us", "run_us", "call_us", "plan_us", "step_us"} if plans else {"us"})
    assert sum(s.seconds for s in subjects) == pytest.approx(2.0)
    assert all(s.seconds == pytest.approx(0.4 * subjects[0].seconds) for s in subjects[1:])


def test_a_slow_subject_is_timed_less_often_but_all_along() -> None:
    clock = _FakeClock()
    spreads = interleave(
        [Subject("fast", "us", lambda: 10.0, 0.1), Subject("slow", "us", lambda: 90_000.0, 0.1)], clock
    )
    assert spreads["slow", "us"].reps == MIN_REPS
    turns = [i for i, took in enumerate(clock.timed[4:]) if took == 90_000.0]
    gaps = [b - a for a, b in pairwise(turns)]
    assert max(gaps) - min(gaps) <= 1


def test_spread_is_median_and_percentiles() -> None:
    assert Spread.of([float(n) for n in range(101)]) == Spread(50.0, 20.0, 80.0, 101)


def _record(impl: str = "octavo", us: float | None = 100.0, case: str = "1x4k/4k", run: str = "r1") -> results.Record:
    problem = Problem(case, parse_case(case))
    event = {"event": "result", "impl": impl, "us": us} if us else {"event": "error", "impl": impl, "error": "wrong"}
    return {**CONTEXT.record(problem, event), "run": run}


def test_rates_follow_from_the_problem() -> None:
    record = _record(us=1000.0)
    pairs = 4096 * 4097 // 2
    assert record["tflops"] == pytest.approx(4 * 32 * 128 * pairs / 1e9, rel=1e-4)
    assert record["gbps"] == pytest.approx(record["bytes"] / 1e6, rel=1e-4)


def test_results_survive_a_cut_line(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    results.append(path, _record())
    with path.open("a") as file:
        file.write('{"run": "r1", "case')
    assert len(results.read(path)) == 1
    results.append(path, _record("fa4"))
    assert [r["impl"] for r in results.read(path)] == ["octavo", "fa4"]


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('{"run": 1}\n')
    with pytest.raises(ValueError, match=r"r\.jsonl:1: expected .*fix:"):
        results.read(path)


def test_the_last_run_and_its_last_record_count() -> None:
    records = [_record(us=5.0), _record(us=7.0, run="r2"), _record(us=9.0, run="r2")]
    assert [r["us"] for r in results.of_run(records)] == [9.0]
    assert [r["us"] for r in results.of_run(records, "r1")] == [5.0]


def test_absent_ones_say_why(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("raise SystemExit('no driver')")
    names = ["octavo", "nobody", "broken", "gone"]
    present, absent = find(names, adapters={"broken": str(broken), "gone": str(tmp_path / "gone.py")})
    assert list(present) == ["octavo"] and set(absent) == {"nobody", "broken", "gone"}
    assert "no driver" in absent["broken"] and "--adapter nobody=FILE.py" in absent["nobody"]


def test_defaults_are_recorded() -> None:
    assert {*DEFAULT["cuda"], *DEFAULT["cpu"], "flex"} == set(RECORDED)


_FAKE_PEERS = {
    "use_flashinfer": """
        def make(q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, page_size, num_qo_heads, num_kv_heads, sm_scale,
                 backend="fa2", kv_last_page_len=None, causal=True):
            plans = []
            def run():
                assert plans and k_cache.shape[1:3] == (page_size, num_kv_heads) and q.shape[1] == num_qo_heads
                tables = qo_indptr, kv_indptr, kv_indices
                return compute(q, k_cache, v_cache, *tables, sm_scale, kv_last_page_len, causal)
            return lambda: plans.append(backend), run

        def make_decode(q, k_cache, v_cache, kv_indptr, kv_indices, page_size, num_qo_heads, num_kv_heads, sm_scale,
                        kv_last_page_len=None):
            qo_indptr = torch.arange(len(q) + 1)
            return make(q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, page_size, num_qo_heads, num_kv_heads,
                        sm_scale, kv_last_page_len=kv_last_page_len)
    """,
    "use_fa4": """
        def make(q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, page_size, num_qo_heads, num_kv_heads, sm_scale,
                 kv_last_page_len=None, causal=True):
            args = q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, sm_scale, kv_last_page_len, causal
            return lambda: natural(*compute(*args))
    """,
    "use_fa3_dense": """
        def make(q, k, v, cu_seqlens_q, cu_seqlens_k, sm_scale, causal=True, num_splits=1, pack_gqa=None):
            args = q, k[:, None], v[:, None], cu_seqlens_q, cu_seqlens_k, torch.arange(len(k)), sm_scale, None, causal
            return lambda: natural(*compute(*args))
    """,
}
_FAKE_COMMON = """
    import math, torch, octavo

    def compute(q, k, v, qo, kv, ids, scale, last, causal):
        return octavo.run(q, k, v, qo.int(), kv.int(), ids.int(), scale, last_page_len=last, causal=causal)

    def natural(out, lse):
        lse = lse.T * math.log(2)
        return out, torch.where(lse == -math.inf, math.inf, lse)
"""


@pytest.fixture
def peers_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Modules with the peers' interface, computed by Octavo itself."""
    for name, text in _FAKE_PEERS.items():
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(_FAKE_COMMON) + textwrap.dedent(text))
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    return str(tmp_path)


def _inputs(qo: tuple[int, ...], kv: tuple[int, ...], page_size: int = 1) -> Inputs:
    spec = AttentionSpec(4, 2, 128, page_size=page_size)
    return make_inputs(Workload("w", qo, kv), spec, "cpu")


@pytest.mark.parametrize(
    ("impl", "inputs"),
    [
        ("flashinfer-fa2", _inputs((5, 3), (9, 2), page_size=4)),
        ("flashinfer-fa3", _inputs((5, 3), (9, 2))),
        ("flashinfer-decode", _inputs((1, 1, 1), (9, 2, 33), page_size=4)),
        ("fa4", _inputs((5, 3), (9, 2), page_size=4)),
        ("fa3-dense", _inputs((5, 3), (9, 2), page_size=4)),
        ("sdpa-flash", _inputs((5, 5, 1), (5, 5, 40), page_size=4)),
        ("sdpa-gather", _inputs((5, 2, 1), (5, 9, 40), page_size=4)),
        ("octavo", _inputs((5, 3), (9, 2), page_size=4)),
        ("flex", _inputs((5, 2, 1), (5, 9, 40), page_size=4)),
    ],
)
def test_adapters_pass_the_gate(impl: str, inputs: Inputs, peers_dir: str) -> None:
    """What each adapter hands over and takes back, rows without keys included."""
    present, absent = find([impl], peers_dir)
    assert not absent
    prepared = present[impl].make(inputs)
    if prepared.plan is not None:
        prepared.plan()
    verdict, (out, _) = Gate.of(inputs).check(prepared, prepared.run)
    assert verdict.ok, verdict.message
    assert out.shape == (inputs.q.shape[0], 4, 128)


def test_variable_length_attention_of_pytorch_gets_a_block_table() -> None:
    """Its own kernels need a GPU: a function with its arguments, computed by Octavo, stands in."""
    inputs = _inputs((5, 3, 2), (9, 2, 7), page_size=4)

    def varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa, seqused_k, block_table):  # type: ignore[no-untyped-def]
        assert (cu_k, max_q, max_k, window_size, enable_gqa) == (None, 5, 9, (-1, 0), True)
        batch = octavo.PagedBatch.dense(cu_q, block_table, seqused_k)
        return octavo.attend(q, octavo.PagedKV(k, v), batch, sm_scale=scale)[0]

    def refuses(*arguments: object, **named: object) -> None:
        raise RuntimeError("page size 4")

    prepared = torch_extra._varlen(SimpleNamespace(varlen_attn=varlen_attn), inputs)
    verdict, _ = Gate.of(inputs).check(prepared, prepared.run)
    assert verdict.ok, verdict.message
    with pytest.raises(Unsupported, match="page size 4"):
        torch_extra._varlen(SimpleNamespace(varlen_attn=refuses), inputs)


def test_variants_are_left_out_by_those_that_do_not_know_them() -> None:
    @dataclass(frozen=True)
    class Variant(AttentionSpec):
        some_window: int = -1

    require_plain(Variant(4, 2, 128))
    with pytest.raises(Unsupported, match="some_window=7"):
        require_plain(Variant(4, 2, 128, some_window=7))


@pytest.mark.parametrize(("q_len", "kv_len", "window"), [(5, 9, 0), (5, 9, 3), (9, 5, 2), (4, 4, 9), (1, 30, 7)])
def test_pairs_in_a_window_are_those_counted_one_by_one(q_len: int, kv_len: int, window: int) -> None:
    workload = Workload("w", (q_len,), (kv_len,))
    places = [i + kv_len - q_len for i in range(q_len)]
    seen = sum(place - window <= key <= place for place in places for key in range(kv_len))
    assert workload.visible_pairs(window_left=window) == seen


def test_the_gate_sees_unwritten_memory() -> None:
    inputs = _inputs((5, 3), (9, 12))
    prepared = find(["octavo"])[0]["octavo"].make(inputs)
    out, lse = prepared.buffers
    verdict, _ = Gate.of(inputs).check(prepared, lambda: (out, lse))
    assert not verdict.ok
    assert torch.isnan(out).all()


def test_the_adapter_in_the_docs_works(tmp_path: Path) -> None:
    """The example in docs/benchmarks.md, as it stands there."""
    docs = Path(__file__).resolve().parent.parent / "docs/benchmarks.md"
    (tmp_path / "example.py").write_text(docs.read_text().split("```python\n", 1)[1].split("```", 1)[0])
    inputs = _inputs((5, 3), (9, 2), page_size=4)
    found = find(["example"], adapters={"example": str(tmp_path / "example.py")})[0]["example"]
    prepared = found.make(inputs)
    verdict, _ = Gate.of(inputs).check(prepared, prepared.run)
    assert verdict.ok, verdict.message
    assert dict(found.versions) == {"my-library": "1.0"}


def test_the_gate_finds_the_one_wrong_row() -> None:
    """Rows that no sample holds are found by their distance from an estimate of all rows."""
    inputs = _inputs((300, 200), (400, 250))
    prepared = find(["octavo"])[0]["octavo"].make(inputs)
    gate = Gate.of(inputs)
    right, lse = prepared.run() if prepared.plan is None else (prepared.plan(), prepared.run())[1]
    assert gate.judge(right, lse).ok
    for row in (11, 123, 333, 456):
        assert row not in gate.rows
        wrong = right.clone()
        wrong[row, 3, 5:9] += 0.05
        assert f"row {row} " in gate.judge(wrong, lse).message
        off = lse.clone()
        off[row, 2] += 0.01
        assert f"row {row} " in gate.judge(right, off).message


def test_a_peers_lse_may_be_coarse_but_not_wrong() -> None:
    inputs = _inputs((5, 3), (9, 12))
    gate = Gate.of(inputs)
    out, lse = octavo.attend(inputs.q, inputs.kv, inputs.batch)
    assert gate.judge(out, lse + 0.002, PEERS_LSE_SLACK).ok and not gate.judge(out, lse + 0.002).ok
    assert not gate.judge(out, lse + 0.005, PEERS_LSE_SLACK).ok


def test_the_estimate_is_the_oracle_in_float32() -> None:
    inputs = _inputs((5, 40, 3), (2, 70, 0), page_size=4)
    out, lse = estimate(inputs)
    kv = inputs.kv
    exact_out, exact_lse = reference(inputs.spec, inputs.q, kv.k_cache, kv.v_cache, inputs.batch)
    torch.testing.assert_close(out.double(), exact_out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
def test_a_span_holds_the_devices_time_and_not_the_hosts() -> None:
    clock = CudaClock(torch.device("cuda"))
    x = torch.zeros(1024, device="cuda")

    def slow_to_enqueue() -> None:
        time.sleep(0.001)
        x.add_(1)

    clock.span(slow_to_enqueue, 3000)
    assert clock.span(slow_to_enqueue, 3000) < 200
    assert clock.wall(slow_to_enqueue) > 1000
