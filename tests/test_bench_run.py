"""The benchmark as a whole on the CPU: worker processes, blame, results file, resume, another revision."""

import contextlib
import json
import os
import re
import shutil
import socket
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from octavo.bench import results, server, session
from octavo.bench.problems import Problem, parse_case
from octavo.bench.processes import Start, _Fallback, processes
from octavo.bench.runner import PACKAGE_ROOT, Event, Settings, run_case
from octavo.bench.session import Options
from octavo.bench.worker import PROTOCOL
from octavo.cli.app import app
from octavo.problem import AttentionSpec

SMALL = AttentionSpec(4, 2, 32, page_size=4)
SMALL_OPTIONS = ["--qo-heads", "4", "--kv-heads", "2", "--head-dim", "32", "--page-size", "4", "--seconds", "0.02"]
FIELDS = {
    *("run", "date", "commit", "card", "versions", "ceilings", "case", "impl", "pages", "spec", "flops", "bytes"),
    *(
        "us",
        "us_low",
        "us_high",
        "tflops",
        "gbps",
        "run_us",
        "call_us",
        "plan_us",
        "step_us",
        "reps",
        "repeats",
        "backend",
    ),
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
    with processes(settings.root, ["octavo"], None, settings.adapters) as start:
        found = list(run_case(start, settings, problem, list(ADAPTERS), lambda event: None))
    answers = {event["impl"]: event for event in found}
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


def test_new_interpreters_where_nothing_is_forked(tmp_path: Path) -> None:
    adapters = {name: file for name, file in _write_adapters(tmp_path).items() if name in ("dies", "works")}
    settings = Settings("cpu", 0.02, 20.0, adapters=adapters, threads=1, fork=False)
    problem = Problem("2x4/9", parse_case("2x4/9"), SMALL)
    with processes(settings.root, ["dies", "works"], None, adapters, settings.fork) as start:
        found = {event["impl"]: event for event in run_case(start, settings, problem, list(adapters), lambda e: None)}
    assert found["dies"]["error"].startswith("first call: killed by SIGSEGV")
    assert found["works"]["event"] == "result"


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs os.pidfd_open")
def test_what_breaks_the_server_is_imported_by_workers(tmp_path: Path) -> None:
    """An import that ends the process costs the server that implementation only."""
    (tmp_path / "ends.py").write_text("import os\nos._exit(3)\n")
    (tmp_path / "fine.py").write_text("import os\nIMPORTED_BY = os.getpid()\nmake = None\n")
    adapters = {name: str(tmp_path / f"{name}.py") for name in ("ends", "fine")}
    settings = Settings("cpu", 0.02, 20.0, adapters=adapters, threads=1)
    problem = Problem("1x1/1", parse_case("1x1/1"), SMALL)
    with processes(settings.root, list(adapters), None, adapters) as start:
        assert isinstance(getattr(start, "__self__", None), _Fallback)
        found = {event["impl"]: event for event in run_case(start, settings, problem, ["ends"], lambda e: None)}
    assert found["ends"]["error"].startswith("import: exit code 3")


def test_an_open_device_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files stand in for the driver's: an implementation that opens it while it is imported spoils forking."""
    driver = tmp_path / "driver"
    driver.touch()
    (tmp_path / "opens.py").write_text(f"held = open({str(driver)!r})\n")
    (tmp_path / "shy.py").write_text("")
    monkeypatch.setattr(server, "_DRIVER_FILE", str(driver))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        asked = {"peers": None, "adapters": {name: str(tmp_path / f"{name}.py") for name in ("shy", "opens")}}
        assert server._import_all(ours, {**asked, "impls": ["shy"]}) == {"ready": True}
        assert server._import_all(ours, {**asked, "impls": ["shy", "opens"]}) == {"spoilt": "opens"}
        assert server._import_all(ours, {**asked, "impls": []}) == {"spoilt": ""}
    sys.modules.pop("octavo_adapter_opens").held.close()
    assert not server.device_is_open()


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
    assert "sdpa" in first.output and re.search(r"time: .*check \d", first.output)

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

    def fake_probe(start: Start, settings: Settings, impls: list[str], dtype: str, on_event: object) -> Event:
        return {**answer, "present": {name: {} for name in impls}}

    def fake_case(
        start: Start, settings: Settings, problem: Problem, impls: list[str], on_event: object
    ) -> list[Event]:
        roots.append(settings.root)
        assert (settings.root / "octavo/__init__.py").is_file()
        return [{"event": "result", "impl": name, "us": 5.0} for name in impls]

    monkeypatch.setattr(session, "processes", lambda *arguments: contextlib.nullcontext())
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
    with processes(settings.root, names, None, {}) as start:
        answers = {event["impl"]: event for event in run_case(start, settings, problem, names, lambda event: None)}
    assert [answers[name]["event"] for name in names] == ["result"] * 3, answers
    for name in ("octavo", "octavo-triton"):
        assert answers[name]["run_us"] > 0 and answers[name]["host_us"] > 0 and answers[name]["plan_host_us"] > 0
        assert answers[name]["repeats"]
