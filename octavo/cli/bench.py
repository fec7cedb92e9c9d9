"""`octavo bench`: time Octavo and its peers on problems kept as data, each result checked first."""

import json
import re
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from octavo.bench import implementations, problems
from octavo.bench.problems import Problem
from octavo.bench.runner import Event, Settings, WorkerFailure
from octavo.bench.session import Keep, Options, execute
from octavo.bench.summary import summarize
from octavo.bench.table import broken, closing_lines, results_table
from octavo.bench.workloads import read_jsonl
from octavo.cli.options import console, parse_device, parse_dtype, usage_error, usage_errors
from octavo.cli.options import option as _option
from octavo.errors import fail
from octavo.problem import AttentionSpec

_PROBLEMS = "What to measure"
_WHO = "Who takes part"
_HOW = "How to measure"
_WHERE = "Where results go"


_SETS = ", ".join(problems.SETS)
Sets = Annotated[list[str] | None, _option(_PROBLEMS, f"Set of problems: {_SETS}. Repeatable.", "--set")]
Cases = Annotated[list[str] | None, _option(_PROBLEMS, "A batch by name, such as 8x1k/4k. Repeatable.", "--case")]
Workloads = Annotated[list[Path] | None, _option(_PROBLEMS, "File of JSON lines with qo_lens and kv_lens. Repeatable.")]
Pattern = Annotated[str | None, _option(_PROBLEMS, "Only cases whose name this regular expression finds.", "--filter")]
Quick = Annotated[bool, _option(_PROBLEMS, "A few cases, measured briefly.", "--quick")]
QoHeads = Annotated[int, _option(_PROBLEMS, "Query heads.")]
KvHeads = Annotated[int, _option(_PROBLEMS, "K/V heads.")]
HeadDim = Annotated[int, _option(_PROBLEMS, "Elements per query and key head.")]
ValueDim = Annotated[int | None, _option(_PROBLEMS, "Elements per value head; as --head-dim if left out.")]
PageSize = Annotated[int, _option(_PROBLEMS, "Keys per page.")]
Dtype = Annotated[str, _option(_PROBLEMS, "bf16, fp16 or fp32.")]
Causal = Annotated[bool, _option(_PROBLEMS, "Causal mask, aligned to the last key.")]
Scattered = Annotated[bool, _option(_PROBLEMS, "Order of page ids in the cache.", "--scattered/--consecutive")]
Seed = Annotated[int, _option(_PROBLEMS, "Seed of the random tensors and page order.")]
Impls = Annotated[str | None, _option(_WHO, "Comma-separated names; all for this device if left out.", "--impl")]
Only = Annotated[list[str] | None, _option(_WHO, "IMPL=REGEX: this one on matching cases only. Repeatable.")]
Peers = Annotated[Path | None, _option(_WHO, "Folder with use_flashinfer.py, use_fa4.py, use_fa3_dense.py.")]
Adapters = Annotated[
    list[str] | None, _option(_WHO, "NAME=FILE.py that defines make(inputs). Repeatable.", "--adapter")
]
Compare = Annotated[str | None, _option(_WHO, "Also measure Octavo at this git revision.")]
Device = Annotated[str, _option(_HOW, "auto, cpu or cuda.")]
Seconds = Annotated[float | None, _option(_HOW, "Time to spend on each figure; 0.25 (0.1 with --quick).")]
PerImpl = Annotated[
    float | None, _option(_HOW, "Time to spend on each implementation in a case instead, all its figures together.")
]
Limit = Annotated[float, _option(_HOW, "Seconds after which a case's process is ended.", "--time-limit")]
Threads = Annotated[int | None, _option(_HOW, "PyTorch threads of a CPU run.")]
Fork = Annotated[
    bool, _option(_HOW, "Fork each case's process from one that has imported everything.", "--fork/--no-fork")
]
AsJson = Annotated[bool, _option(_WHERE, "Print records as JSON lines instead of a table.", "--json")]
Out = Annotated[Path | None, _option(_WHERE, "Results file to append to [default: benchmarks/results/CARD.jsonl].")]
Extra = Annotated[Path | None, _option(_WHERE, "File for implementations of other than the recorded names.")]
Save = Annotated[bool, _option(_WHERE, "Write the results file.")]
Run = Annotated[str | None, _option(_WHERE, "Run id: cases that the file holds under it are skipped.")]
Resume = Annotated[bool, _option(_WHERE, "Go on with the last run in the results file.", "--resume")]
Commit = Annotated[str | None, _option(_WHERE, "Commit to record where git is absent.")]


def bench(
    *,
    sets: Sets = None,
    case: Cases = None,
    workloads: Workloads = None,
    pattern: Pattern = None,
    quick: Quick = False,
    qo_heads: QoHeads = 32,
    kv_heads: KvHeads = 4,
    head_dim: HeadDim = 128,
    value_dim: ValueDim = None,
    page_size: PageSize = 1,
    dtype: Dtype = "bf16",
    causal: Causal = True,
    scattered: Scattered = True,
    seed: Seed = 0,
    impl: Impls = None,
    only: Only = None,
    peers: Peers = None,
    adapter: Adapters = None,
    compare: Compare = None,
    device: Device = "auto",
    seconds: Seconds = None,
    seconds_per_impl: PerImpl = None,
    time_limit: Limit = 120.0,
    threads: Threads = None,
    fork: Fork = True,
    as_json: AsJson = False,
    out: Out = None,
    extra: Extra = None,
    save: Save = True,
    run: Run = None,
    resume: Resume = False,
    commit: Commit = None,
) -> None:
    """Time Octavo and other implementations side by side; a wrong result gets no time. See docs/benchmarks.md."""
    with usage_errors():
        kind = parse_device(device).type
        spec = AttentionSpec(qo_heads, kv_heads, head_dim, value_dim, page_size, causal, parse_dtype(dtype))
        found = _Choice(sets or [], case or [], workloads or [], quick, kind).problems(spec)
        found = [replace(p, scattered=p.scattered and scattered, seed=seed) for p in found]
        found = problems.select(found, _regex("--filter", pattern))
        adapters = {name: str(Path(file).resolve()) for name, file in _pairs("--adapter", adapter).items()}
        folder = str(peers.resolve()) if peers else None
        brief = 0.1 if quick else 0.25
        settings = Settings(
            kind, seconds or brief, time_limit, folder, adapters, threads, fork, seconds_per_impl=seconds_per_impl
        )
        keep = Keep(out, extra, save, run, resume, commit)
        patterns = {name: _regex("--only", value) or "" for name, value in _pairs("--only", only).items()}
        _go(Options(found, _impls(impl, adapters, kind), settings, patterns, keep, compare), as_json)


@dataclass(frozen=True)
class _Choice:
    """Which problems were asked for; the rows set if nothing was."""

    sets: list[str]
    cases: list[str]
    workloads: list[Path]
    quick: bool
    device: str

    def problems(self, spec: AttentionSpec) -> list[Problem]:
        unknown = set(self.sets) - set(problems.SETS)
        if unknown:
            fail("--set", f"some of {_SETS}", sorted(unknown), "see --help")
        sets = self.sets or ([] if self.cases or self.workloads else ["rows"])
        found = problems.named(self.cases, spec)
        for name in sets:
            found += problems.problem_set(name, spec, device=self.device, quick=self.quick)
        for path in self.workloads:
            found += problems.from_workloads(read_jsonl(path), spec, device=self.device)
        return found


def _regex(option: str, pattern: str | None) -> str | None:
    if pattern is not None:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{option}: expected a regex, got {pattern!r} ({error}); fix: escape it") from error
    return pattern


def _pairs(option: str, values: Sequence[str] | None) -> dict[str, str]:
    pairs = {}
    for value in values or []:
        name, sign, rest = value.partition("=")
        if not (sign and name and rest):
            fail(option, "NAME=VALUE", repr(value), "seed=FILE.py or seed=^1x, say")
        pairs[name] = rest
    return pairs


def _impls(names: str | None, adapters: dict[str, str], device: str) -> list[str]:
    """Those named, or all for the device; given adapters take part in any case."""
    chosen = names.split(",") if names else list(implementations.DEFAULT[device])
    return list(dict.fromkeys([*(name.strip() for name in chosen if name.strip()), *adapters]))


class _Bar:
    """Progress on stderr; stdout is left to the results."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("looking at the machine", total=None)
        self._name = ""
        self._stage, self._since = "start", time.monotonic()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def probed(self, answer: Event, cases: int) -> None:
        self._progress.update(self._task, total=cases)
        tflops, gbps = answer["ceilings"]["tflops"], answer["ceilings"]["gbps"]
        say = self._progress.console.print
        say(f"{answer['card']}: matmul {tflops:.3g} TFLOP/s, copy {gbps:.4g} GB/s", markup=False)
        for name, reason in answer["absent"].items():
            say(f"absent: {name} ({reason})", markup=False)

    def case(self, name: str) -> None:
        self._name = name
        self._enter("start")
        self._progress.update(self._task, description=name)

    def event(self, event: Event) -> None:
        if event["event"] == "stage":
            self._enter(event["stage"])
            text = f"{self._name} · {event['impl']} · {event['stage']}"
            self._progress.update(self._task, description=text)
        elif event["event"] in ("error", "unsupported"):
            why = event.get("error") or event.get("reason")
            self._progress.console.print(f"{self._name}: {event['impl']}: {why}", markup=False)

    def case_done(self) -> None:
        self._enter("start")
        self._progress.advance(self._task)

    def _enter(self, stage: str) -> None:
        now = time.monotonic()
        self._seconds[self._stage] += now - self._since
        self._stage, self._since = stage, now

    def stages(self) -> str:
        """Where the time went."""
        self._enter("")
        longest = sorted(self._seconds.items(), key=lambda item: -item[1])
        return ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in longest if stage)


def _go(options: Options, as_json: bool) -> None:
    columns = (BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console(stderr=True), transient=True) as progress:
        bar = _Bar(progress)
        try:
            outcome = execute(options, bar)
        except WorkerFailure as failure:
            usage_error(f"bench: the worker process failed before the first case: {failure}")
        progress.console.print(f"time: {bar.stages()}", markup=False, highlight=False)
    if as_json:
        for record in outcome.records:
            typer.echo(json.dumps(record))
    if not outcome.records:
        usage_error("bench: no implementation took part; the reasons are above")
    summary = summarize(outcome.records)
    if not as_json:
        console().print(results_table(summary))
        for line in closing_lines(summary):
            typer.echo(line)
        typer.echo(f"run {outcome.run}" + (f", written to {outcome.out}" if options.keep.save else ""))
    raise typer.Exit(1 if broken(summary) else 0)
