"""Results as JSON lines: one record per case and implementation, each with what is needed to read it alone."""

import json
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from octavo.bench.problems import Problem, spec_as_json
from octavo.bench.runner import Event

Record = dict[str, Any]
RESULTS_FOLDER = Path("benchmarks/results")
DIRTY = "-dirty"


@dataclass(frozen=True)
class Context:
    """What all records of a run share."""

    run: str
    commit: str
    card: str
    versions: Mapping[str, str]
    ceilings: Mapping[str, float]
    sms: int = 0
    """Streaming multiprocessors of the card."""

    def record(self, problem: Problem, event: Event) -> Record:
        """The record of one "result" or "error" event."""
        record = {
            "run": self.run,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "commit": self.commit,
            "card": self.card,
            "sms": self.sms,
            "versions": dict(self.versions),
            "ceilings": dict(self.ceilings),
            "case": problem.name,
            "impl": event["impl"],
            "pages": problem.pages,
            "spec": spec_as_json(problem.spec),
            "source": problem.workload.source,
            "sequences": len(problem.workload.qo_lens),
            "tokens": problem.workload.num_tokens,
            "keys": sum(problem.workload.kv_lens),
            "flops": problem.flops,
            "bytes": problem.bytes,
        }
        if event["event"] == "error":
            return {**record, "error": event["error"]}
        return {**record, **_rounded(event), **_rates(problem, event["us"])}


def _rounded(event: Event) -> Record:
    fields = {name: value for name, value in event.items() if name not in ("event", "impl")}
    return {name: _short(value) if isinstance(value, float) else value for name, value in fields.items()}


def _rates(problem: Problem, us: float) -> Record:
    return {"tflops": _short(problem.flops / us / 1e6), "gbps": _short(problem.bytes / us / 1e3)}


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def key_of(record: Record) -> tuple[str, ...]:
    """What a record measures: case, implementation, page order and spec (and the commit, where two are compared)."""
    spec = json.dumps(record["spec"], sort_keys=True)
    return record["case"], record["impl"], record["pages"], spec, record["commit"]


def append(path: Path, record: Record) -> None:
    """Add one line. What a crash left of a line at the end of the file is dropped first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(json.dumps(record).encode() + b"\n")


def read(path: Path) -> list[Record]:
    """The records of a results file; none for a missing file. A line cut at the end of the file is ignored.

    Raises ValueError naming the line that is no result.
    """
    if not path.exists():
        return []
    records = []
    *lines, _cut = path.read_text().split("\n")
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            key_of(record)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}:{number}: expected one result as JSON, got {line[:60]!r}; fix: delete the line"
            ) from error
        records.append(record)
    return records


def of_run(records: Iterable[Record], run: str | None = None) -> list[Record]:
    """The records of one run (None: the last in the file); of two records of the same thing, the later."""
    records = list(records)
    wanted = run or (records[-1]["run"] if records else "")
    return list({key_of(record): record for record in records if record["run"] == wanted}.values())


def default_path(card: str) -> Path:
    """benchmarks/results/CARD.jsonl inside a checkout, else octavo-bench.jsonl in the current folder."""
    slug = "cpu" if card.startswith("CPU") else "-".join(card.lower().split())
    return RESULTS_FOLDER / f"{slug}.jsonl" if RESULTS_FOLDER.is_dir() else Path("octavo-bench.jsonl")


def git(root: Path, *arguments: str) -> str | None:
    """What git prints, or None where there is no git or no repository."""
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def commit_of(root: Path) -> str | None:
    """Short revision of the checkout at `root`, with "-dirty" when files other than results differ from it.

    None where there is no git, or where the package is not tracked (installed, say).
    """
    if git(root, "ls-files", "--error-unmatch", "octavo/__init__.py") is None:
        return None
    revision = git(root, "rev-parse", "--short=12", "HEAD")
    if revision is None:
        return None
    changed = git(root, "status", "--porcelain", "--", ".", f":!{RESULTS_FOLDER}")
    return revision + (DIRTY if changed else "")


def driver_version() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split()[0] if done.stdout.strip() else None


def new_run_id(commit: str) -> str:
    return f"{datetime.now(timezone.utc):%Y%m%dT%H%M%S}-{commit}"
