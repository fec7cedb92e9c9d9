"""Runs requests in worker processes under a time limit, and says which implementation a hang or a fault belongs to."""

import json
import os
import queue
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import octavo
from octavo.bench.problems import Problem
from octavo.bench.processes import IMPORT_S, Files, ServerFailure, Start

Event = dict[str, Any]
OnEvent = Callable[[Event], object]
PACKAGE_ROOT = Path(octavo.__file__).resolve().parent.parent
TIMING = "time"
TURN_BYTES = 128


class WorkerFailure(Exception):
    """A worker process ended early. `blame` is the implementation that it was busy with, or ""."""

    def __init__(self, message: str, blame: str) -> None:
        super().__init__(message)
        self.blame = blame


@dataclass(frozen=True)
class Settings:
    """What all cases of a run share."""

    device: str = "cuda"
    seconds: float = 0.25
    """How long each thing is measured, about."""
    limit_s: float = 120.0
    peers: str | None = None
    adapters: dict[str, str] = field(default_factory=dict)
    threads: int | None = None
    fork: bool = True
    """Fork workers from a process that has imported everything; else each is a new interpreter."""
    seconds_per_impl: float | None = None
    """Instead of `seconds`: how long all things of one implementation are measured together."""
    root: Path = PACKAGE_ROOT
    """Folder that holds the `octavo` package to measure."""

    def request(self, action: str, impls: list[str], **more: object) -> Event:
        shared = {"device": self.device, "seconds": self.seconds, "seconds_per_impl": self.seconds_per_impl}
        found = {"impls": impls, "peers": self.peers, "adapters": self.adapters}
        return {"action": action, "threads": self.threads, **shared, **found, **more}


def probe(start: Start, settings: Settings, impls: list[str], dtype: str, on_event: OnEvent) -> Event:
    """The device, its ceilings, and which implementations are there. One that breaks the import is reported absent."""
    wanted = list(impls)
    broken: dict[str, str] = {}
    while True:
        try:
            for event in _run_worker(start, settings, settings.request("probe", wanted, dtype=dtype), on_event):
                if event["event"] == "probe":
                    return {**event, "absent": {**event["absent"], **broken}}
            raise WorkerFailure("the worker ended without an answer", "")
        except WorkerFailure as failure:
            if failure.blame not in wanted:
                raise
            broken[failure.blame] = str(failure)
            wanted.remove(failure.blame)


def run_case(
    start: Start, settings: Settings, problem: Problem, impls: list[str], on_event: OnEvent
) -> Iterator[Event]:
    """Events "result", "error" and "unsupported", one per implementation.

    A hang or a fault costs the implementation it came from; the others are run again without it.
    """
    left = list(impls)
    while left:
        request = settings.request("case", left, problem=problem.as_json())
        try:
            for event in _run_worker(start, settings, request, on_event):
                if event["event"] != "stage":
                    left.remove(event["impl"])
                    yield event
            for name in left:
                yield {"event": "error", "impl": name, "error": "the worker ended without an answer"}
            return
        except WorkerFailure as failure:
            # An implementation that has answered already only broke the process for the rest.
            blamed = [failure.blame] if failure.blame in left else ([] if failure.blame else left)
            for name in blamed:
                yield {"event": "error", "impl": name, "error": str(failure)}
            left = [name for name in left if name not in blamed]


def _run_worker(start: Start, settings: Settings, request: Event, on_event: OnEvent) -> Iterator[Event]:
    """The worker's events as they come. Raises WorkerFailure when it hangs or ends other than with 0."""
    with tempfile.TemporaryFile() as asked, tempfile.TemporaryFile() as log, tempfile.TemporaryFile() as turn:
        asked.write(json.dumps({**request, "turn_file": turn.fileno()}).encode())
        asked.seek(0)
        answers, theirs = os.pipe()
        stage: Event = {"impl": "", "stage": "start"}
        process = None
        try:
            try:
                process = start(Files(asked, theirs, log, turn))
            finally:
                os.close(theirs)
            for event in _lines(answers, settings.limit_s):
                if event["event"] == "stage":
                    stage = event
                on_event(event)
                yield event
            code = process.wait(settings.limit_s)
        except TimeoutError:
            raise _failure(stage, turn, "no end within the time limit") from None
        except ServerFailure as failure:
            raise _failure(stage, turn, str(failure)) from None
        finally:
            if process is not None:
                process.end()
        if code:
            raise _failure(stage, turn, f"{_how_it_ended(code)}; {_last_line(log)}")


def _failure(stage: Event, turn: IO[bytes], why: str) -> WorkerFailure:
    blame = stage["impl"]
    if stage["stage"] == TIMING:
        blame = os.pread(turn.fileno(), TURN_BYTES, 0).decode().strip()
    return WorkerFailure(f"{stage['stage']}: {why}", blame)


def _lines(descriptor: int, limit_s: float) -> Iterator[Event]:
    """JSON lines until the end of the pipe, which is closed then. Raises TimeoutError past the limit."""
    lines: queue.Queue[bytes | None] = queue.Queue()

    def read() -> None:
        with os.fdopen(descriptor, "rb") as answers:
            for line in answers:
                lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    limit = IMPORT_S  # imports are not what a case's limit is for
    deadline = time.monotonic() + limit
    while True:
        try:
            line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise TimeoutError from None
        if line is None:
            return
        event = json.loads(line)
        if limit != limit_s and event.get("stage") != "import":
            limit = limit_s
            deadline = time.monotonic() + limit
        yield event


def _how_it_ended(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _last_line(log: IO[bytes]) -> str:
    log.seek(0, os.SEEK_END)
    log.seek(max(0, log.tell() - 4096))
    lines = log.read().decode(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "nothing on stderr"
