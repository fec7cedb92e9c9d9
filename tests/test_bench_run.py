"""The benchmark as a whole on the CPU: worker processes, blame, results file, resume, another revision."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from octavo.bench import results, session
from octavo.bench.problems import Problem, parse_case
from octavo.bench.runner import PACKAGE_ROOT, Event, Settings, run_case
from octavo.bench.session import Options
from octavo.bench.worker import PROTOCOL
from octavo.cli.app import app
from octavo.problem import AttentionSpec

SMALL = AttentionSpec(4, 2, 32, page_size=4)
SMALL_OPTIONS = ["--qo-heads", "4", "--kv-heads", "2", "--head-dim", "32", "--page-size", "4", "--seconds", "0.02"]
FIELDS = {
    *("run", "date", "commit", "card", "versions", "ceilings", "case", "impl", "pages", "spec", "flops", "bytes"),
    *("us", "us_low", "us_high", "tflops", "gbps", "run_us", "call_us", "plan_us", "reps", "repeats", "backend"),
}
ADAPTERS = {
    "hangs": "return Prepared(run=lambda: time.sleep(600))",
    "dies": "return Prepared(run=lambda: os.kill(os.getpid(), signal.SIGSEGV))",
    "lies": "return Prepared(run=lambda: (inputs.q + 1, inputs.q[..., 0].float()))",
    "stops": "raise Unsupported('not this one')",
    "tires": "calls = iter(range(8)); return Prepared(run=lambda: os.abort() if next(calls, 9) == 9 else right())",
    "works": "return Prepared(run=right)",
}


_ADAPTER = """
import os, signal, time, octavo
from octavo.bench.implementations import Prepared, Unsupported

def make(inputs):
    print("noise on stdout")
    right = lambda: octavo.attend(inputs.q, inputs.kv, inputs.batch)
    {body}
"""


def _write_adapters(folder: Path) -> dict[str, str]:
    for name, body in ADAPTERS.items():
        (folder / f"{name}.py").write_text(_ADAPTER.format(body=body))
    return {name: str(folder / f"{name}.py") for name in ADAPTERS}


def test_a_hang_a_crash_and_a_wrong_result_cost_only_their_own(tmp_path: Path) -> None:
    settings = Settings("cpu", 0.02, 4.0, adapters=_write_adapters(tmp_path), threads=1)
    problem = Problem("2x4/9", parse_case("2x4/9"), SMALL)
    answers = {event["impl"]: event for event in run_case(settings, problem, list(ADAPTERS), lambda event: None)}
    assert {name: event["event"] for name, event in answers.items()} == {
        "hangs": "error",
        "dies": "error",
        "lies": "error",
        "stops": "unsupported",
        "tires": "error",
        "works": "result",
    }
    assert "no end within the time limit" in answers["hangs"]["error"]
    assert "killed by SIGSEGV" in answers["dies"]["error"]
    assert answers["tires"]["error"].startswith("time: killed by SIGABRT")
    assert "rows wrong" in answers["lies"]["error"] and "us" not in answers["lies"]
    assert answers["works"]["us_low"] <= answers["works"]["us"] <= answers["works"]["us_high"]
    assert answers["works"]["repeats"]


def test_bench_writes_whole_records_and_resumes(tmp_path: Path) -> None:
    out, extra = tmp_path / "out.jsonl", tmp_path / "extra.jsonl"
    adapter = f"mine={_write_adapters(tmp_path)['works']}"
    command = ["bench", "--device", "cpu", "--case", "1x3/7", *SMALL_OPTIONS, "--threads", "1", "--commit", "c0ffee"]
    command += ["--adapter", adapter, "--out", str(out), "--extra", str(extra)]
    first = CliRunner().invoke(app, command)
    assert first.exit_code == 0, first.output
    records = results.read(out)
    assert [record["impl"] for record in records] == ["octavo", "sdpa-gather"]
    assert set(records[0]) >= FIELDS and records[0]["commit"] == "c0ffee"
    assert [record["impl"] for record in results.read(extra)] == ["mine"]
    assert "sdpa" in first.output

    again = CliRunner().invoke(app, [*command, "--resume", "--json"])
    assert again.exit_code == 0, again.output
    assert len(results.read(out)) == 2 and len(results.read(extra)) == 1
    shown = [json.loads(line) for line in again.stdout.splitlines() if line.startswith("{")]
    assert {record["impl"] for record in shown} == {"octavo", "sdpa-gather", "mine"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--case", "nonsense"],
        ["--set", "nonsense"],
        ["--filter", "["],
        ["--filter", "no such case"],
        ["--adapter", "no-equals-sign"],
        ["--only", "nobody=^1x"],
        ["--device", "tpu"],
        ["--dtype", "int8"],
        ["--workloads", "missing.jsonl"],
    ],
)
def test_wrong_options_are_one_line_and_exit_code_2(arguments: list[str]) -> None:
    done = CliRunner().invoke(app, ["bench", "--device", "cpu", *arguments])
    assert done.exit_code == 2
    assert "fix:" in done.output and "Traceback" not in done.output


class _Silent:
    def probed(self, answer: Event, cases: int) -> None: ...
    def case(self, name: str) -> None: ...
    def event(self, event: Event) -> None: ...
    def case_done(self) -> None: ...


@pytest.mark.skipif(
    shutil.which("git") is None or results.git(PACKAGE_ROOT, "rev-parse", "HEAD") is None, reason="needs a git checkout"
)
def test_another_revision_is_measured_from_a_worktree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker runs in the other revision's tree, which is gone afterwards."""
    roots: list[Path] = []
    answer = {"protocol": PROTOCOL, "card": "c", "ceilings": {"tflops": 1.0, "gbps": 1.0}, "absent": {}}
    answer |= {"libraries": {"octavo": "0"}, "present": {"octavo": {}, "sdpa-gather": {}}}

    def fake_probe(settings: Settings, impls: list[str], dtype: str, on_event: object) -> Event:
        return {**answer, "present": {name: {} for name in impls}}

    def fake_case(settings: Settings, problem: Problem, impls: list[str], on_event: object) -> list[Event]:
        roots.append(settings.root)
        assert (settings.root / "octavo/__init__.py").is_file()
        return [{"event": "result", "impl": name, "us": 5.0} for name in impls]

    monkeypatch.setattr(session, "probe", fake_probe)
    monkeypatch.setattr(session, "run_case", fake_case)
    head = results.git(PACKAGE_ROOT, "log", "-1", "--format=%H", "--", "octavo/bench/worker.py")
    problems = [Problem("1x3/7", parse_case("1x3/7"), SMALL)]
    keep = session.Keep(save=False, commit="here")
    options = Options(problems, ["octavo", "sdpa-gather"], Settings("cpu"), keep=keep, compare=head)
    records = session.execute(options, _Silent()).records
    assert [(r["impl"], r["commit"]) for r in records][:2] == [("octavo", "here"), ("sdpa-gather", "here")]
    assert records[2]["impl"] == "octavo" and head is not None and head.startswith(records[2]["commit"])
    assert roots[0] == PACKAGE_ROOT and not roots[1].exists()


@pytest.mark.gpu
def test_a_gpu_case_has_every_figure() -> None:
    settings = Settings("cuda", 0.02, 300.0)
    problem = Problem("2x64/300", parse_case("2x64/300"), AttentionSpec(8, 2, 128, page_size=4))
    names = ["octavo", "octavo-triton", "sdpa-flash"]
    answers = {event["impl"]: event for event in run_case(settings, problem, names, lambda event: None)}
    assert [answers[name]["event"] for name in names] == ["result"] * 3, answers
    for name in ("octavo", "octavo-triton"):
        assert answers[name]["run_us"] > 0 and answers[name]["host_us"] > 0 and answers[name]["plan_host_us"] > 0
        assert answers[name]["repeats"]
