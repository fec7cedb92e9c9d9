"""One benchmark run: probe the machine, measure what is not measured yet, write a record for each result."""

import contextlib
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from octavo.bench import results
from octavo.bench.implementations import RECORDED
from octavo.bench.problems import Problem
from octavo.bench.processes import Start, processes
from octavo.bench.results import Context, Record
from octavo.bench.runner import PACKAGE_ROOT, Event, Settings, WorkerFailure, probe, run_case
from octavo.bench.worker import PROTOCOL
from octavo.errors import fail


@dataclass(frozen=True)
class Keep:
    """Where the records go, and which run they belong to."""

    out: Path | None = None
    """Results file; None chooses by card. Holds implementations of recorded names only."""
    extra: Path | None = None
    """File for implementations of other names; None keeps them off the disk."""
    save: bool = True
    run: str | None = None
    resume: bool = False
    commit: str | None = None
    """What to record where git is absent."""


@dataclass(frozen=True)
class Options:
    """What to measure."""

    problems: Sequence[Problem]
    impls: Sequence[str]
    settings: Settings
    only: Mapping[str, str] = field(default_factory=dict)
    """Implementation -> regular expression that a case's name must match for it."""
    keep: Keep = field(default_factory=Keep)
    compare: str | None = None
    """Git revision whose Octavo is measured too."""


class Observer(Protocol):
    """What a run tells its caller as it goes."""

    def probed(self, answer: Event, cases: int) -> None: ...
    def case(self, name: str) -> None: ...
    def event(self, event: Event) -> None: ...
    def case_done(self) -> None: ...


@dataclass(frozen=True)
class _Side:
    """One revision under measurement: the checkout's own, and with `compare` another one's Octavo."""

    start: Start
    settings: Settings
    impls: tuple[str, ...]
    context: Context


@dataclass(frozen=True)
class Outcome:
    records: list[Record]
    """Of this run, those of an interrupted earlier part included."""
    out: Path
    run: str


def execute(options: Options, observer: Observer) -> Outcome:
    """Run it. Raises ValueError for options that do not fit, WorkerFailure when no implementation can be probed."""
    _check(options)
    with contextlib.ExitStack() as stack:
        start, answer = _begin(stack, options, options.settings, options.impls, observer)
        observer.probed(answer, len(options.problems))
        out = options.keep.out or results.default_path(answer["card"])
        run, done = _run_and_done(options.keep, out)
        sides = [_Side(start, options.settings, tuple(answer["present"]), _context(options, answer, run))]
        if options.compare is not None:
            sides.append(stack.enter_context(_other_revision(options, sides[0], observer)))
        records = list(done)
        for problem in options.problems:
            observer.case(problem.name)
            for side in sides:
                for record in _measure(options, side, problem, done, observer.event):
                    _save(options.keep, out, record)
                    records.append(record)
            observer.case_done()
    return Outcome(records, out, run)


def _begin(
    stack: contextlib.ExitStack, options: Options, settings: Settings, impls: Sequence[str], observer: Observer
) -> tuple[Start, Event]:
    """How to start workers, and the probe's answer. Where forked ones cannot use the device, new interpreters."""
    for fork in (True, False) if settings.fork else (False,):
        start = stack.enter_context(processes(settings.root, impls, settings.peers, settings.adapters, fork))
        try:
            return start, probe(start, settings, list(impls), _dtype(options), observer.event)
        except WorkerFailure:
            if not fork:
                raise
    raise AssertionError


def _check(options: Options) -> None:
    if not options.problems:
        fail("problems", "at least one case", "none", "loosen --filter, or use --case")
    unknown = set(options.only) - set(options.impls)
    if unknown:
        fail("--only", "names of implementations that run", sorted(unknown), "see --impl")


def _dtype(options: Options) -> str:
    return str(options.problems[0].spec.dtype).removeprefix("torch.")


def _run_and_done(keep: Keep, out: Path) -> tuple[str, list[Record]]:
    """The run id, and the records that it has already (of implementations that are asked for)."""
    if keep.run is None and not keep.resume:
        return results.new_run_id(_commit(keep)), []
    kept = results.read(out) + (results.read(keep.extra) if keep.extra else [])
    if keep.run is None and not kept:
        raise ValueError(f"--resume: expected a run in {out}, found none; fix: leave it out to start one")
    run = keep.run or max(kept, key=lambda record: record["date"])["run"]
    return run, results.of_run(kept, run)


def _commit(keep: Keep) -> str:
    return keep.commit or results.commit_of(PACKAGE_ROOT) or "unknown"


def _context(options: Options, answer: Event, run: str) -> Context:
    versions = dict(answer["libraries"])
    driver = results.driver_version() if options.settings.device == "cuda" else None
    if driver:
        versions["driver"] = driver
    for name in answer["present"]:
        versions.update(answer["present"][name])
    return Context(run, _commit(options.keep), answer["card"], versions, answer["ceilings"], answer.get("sms", 0))


def _measure(
    options: Options, side: _Side, problem: Problem, done: Sequence[Record], on_event: Callable[[Event], object]
) -> Iterator[Record]:
    have = {results.key_of(record) for record in done}

    def wanted(name: str) -> bool:
        stub = side.context.record(problem, {"event": "error", "impl": name, "error": ""})
        matches = name not in options.only or re.search(options.only[name], problem.name)
        return bool(matches) and results.key_of(stub) not in have

    impls = [name for name in side.impls if wanted(name)]
    for event in run_case(side.start, side.settings, problem, impls, on_event):
        if event["event"] in ("result", "error"):
            yield side.context.record(problem, event)


def _save(keep: Keep, out: Path, record: Record) -> None:
    target = out if record["impl"] in RECORDED else keep.extra
    if keep.save and target is not None:
        results.append(target, record)


@contextlib.contextmanager
def _other_revision(options: Options, ours: _Side, observer: Observer) -> Iterator[_Side]:
    """The same run's Octavo at another git revision, checked out beside this one for as long as the run lasts."""
    ref = options.compare
    assert ref is not None
    revision = results.git(PACKAGE_ROOT, "rev-parse", "--short=12", "--verify", f"{ref}^{{commit}}")
    if revision is None:
        fail("--compare", f"a revision of the checkout at {PACKAGE_ROOT}", repr(ref), "git log")
    if results.git(PACKAGE_ROOT, "cat-file", "-e", f"{revision}:octavo/bench/worker.py") is None:
        fail("--compare", "a revision with octavo/bench/worker.py", repr(ref), "a later one")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "octavo-at-revision"
        if results.git(PACKAGE_ROOT, "worktree", "add", "--detach", str(root), revision) is None:
            raise ValueError(f"--compare: git could not check out {revision} in a worktree; fix: git worktree prune")
        try:
            impls = [name for name in ours.impls if name in ("octavo", "octavo-triton")]
            settings = replace(options.settings, root=root, adapters={}, peers=None)
            with contextlib.ExitStack() as stack:
                start, answer = _begin(stack, options, settings, impls, observer)
                if answer["protocol"] != PROTOCOL:
                    raise ValueError(f"--compare: {ref} has another worker protocol; fix: take a later revision")
                context = replace(
                    ours.context, commit=revision, versions={**ours.context.versions, **answer["libraries"]}
                )
                yield _Side(start, settings, tuple(answer["present"]), context)
        finally:
            results.git(PACKAGE_ROOT, "worktree", "remove", "--force", str(root))
