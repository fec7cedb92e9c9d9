"""Records of one run, arranged by case: what the terminal table and the HTML report show."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from octavo.bench.implementations import RECORDED, UNPAGED
from octavo.bench.results import Record
from octavo.errors import fail

OURS = "octavo"
ORDER = RECORDED
BASELINES = ("seed",)
"""Never the bar, but shown."""


@dataclass
class Case:
    """All records of one case, by label: the implementation's name, with @commit where a run holds several commits."""

    name: str
    flops: int
    bytes: int
    records: dict[str, Record] = field(default_factory=dict)

    def us(self, label: str) -> float | None:
        return self.records.get(label, {}).get("us")

    def timed(self) -> dict[str, Record]:
        """The records that hold a time."""
        return {label: record for label, record in self.records.items() if "us" in record}

    def speed_of(self, label: str, other: str) -> float | None:
        """How many times faster `label` is than `other`."""
        ours, theirs = self.us(label), self.us(other)
        return theirs / ours if ours and theirs else None

    def best_peer(self) -> str | None:
        """The fastest paged implementation that is not Octavo's."""
        timed = [label for label, record in self.timed().items() if is_bar(record["impl"])]
        return min(timed, key=lambda label: self.records[label]["us"], default=None)

    def plan_us(self, label: str) -> float:
        """Planning once a step that `us` leaves out: what a peer does on the host."""
        record = self.records.get(label, {})
        return 0.0 if not record or is_ours(record["impl"]) else float(record.get("plan_us", 0.0))

    def planned_speed_of(self, label: str) -> float | None:
        """How many times faster `label` is than the best paged peer, where each plans in every step."""
        ours = self.us(label)
        peers = [r["us"] + self.plan_us(name) for name, r in self.timed().items() if is_bar(r["impl"])]
        return min(peers) / ours if ours and peers else None

    def memory_bound(self) -> bool:
        """Whether the roofline of the card that measured it puts bandwidth first."""
        ceilings = next(iter(self.records.values()))["ceilings"]
        return self.bytes / ceilings["gbps"] > self.flops / ceilings["tflops"] / 1e3

    def rate(self, label: str) -> str:
        """GB/s where bandwidth is the bound, else TFLOP/s."""
        record = self.records[label]
        value, unit = (record["gbps"], "GB/s") if self.memory_bound() else (record["tflops"], "TF/s")
        return f"{value:.0f} {unit}" if value >= 10 else f"{value:.2g} {unit}"


def is_ours(impl: str) -> bool:
    return impl == OURS or impl.startswith(f"{OURS}-")


def is_bar(impl: str) -> bool:
    return not is_ours(impl) and impl not in UNPAGED and impl not in BASELINES


@dataclass(frozen=True)
class Summary:
    """One run."""

    records: Sequence[Record]
    cases: Sequence[Case]
    labels: Sequence[str]
    """Columns: Octavo first, then peers in their usual order, then other adapters."""

    @property
    def ours(self) -> str:
        """The label that ratios are of."""
        return next((label for label in self.labels if is_ours(label.split("@")[0])), self.labels[0])

    def ratios(self) -> list[float]:
        """Octavo's speed over the best paged peer's, one per case that has both."""
        pairs = [(case, case.best_peer()) for case in self.cases]
        found = [case.speed_of(self.ours, peer) for case, peer in pairs if peer is not None]
        return [ratio for ratio in found if ratio is not None]

    def planned_ratios(self) -> list[float]:
        """The same, with the peers' planning."""
        found = [case.planned_speed_of(self.ours) for case in self.cases]
        return [ratio for ratio in found if ratio is not None]

    def failures(self) -> list[Record]:
        return [record for record in self.records if "error" in record]


def summarize(records: Iterable[Record]) -> Summary:
    """Arrange the records of one run. Raises ValueError when there are none."""
    records = list(records)
    if not records:
        fail("results", "at least one record", "none", "run `octavo bench` first")
    latest = records[0]["commit"]
    cases: dict[str, Case] = {}
    labels: dict[str, tuple[int, str]] = {}
    for record in records:
        label = record["impl"] if record["commit"] == latest else f"{record['impl']}@{record['commit'][:7]}"
        name = case_name(record)
        case = cases.setdefault(name, Case(name, record["flops"], record["bytes"]))
        case.records[label] = record
        labels[label] = (_position(record["impl"]), label)
    return Summary(records, list(cases.values()), sorted(labels, key=lambda label: labels[label]))


def case_name(record: Record) -> str:
    """The case's name, and its page order where that is not the usual one."""
    return record["case"] if record["pages"] == "scattered" else f"{record['case']} {record['pages']}"


def _position(impl: str) -> int:
    return ORDER.index(impl) if impl in ORDER else len(ORDER)


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(math.log(value) for value in values) / len(values))
