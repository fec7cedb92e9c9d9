"""Interleaved measurement: every subject once, then every subject again, each behind a flushed cache."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

MIN_REPS, MIN_REPS_SLOW, MAX_REPS = 7, 3, 200
SLOW_US = 150_000
"""A call longer than this is repeated MIN_REPS_SLOW times at least, not MIN_REPS."""
MAX_LEAD_US = 3_000
HOST_CALLS = 100


class Clock(Protocol):
    """Microseconds of one call on one kind of device."""

    def span(self, call: Callable[[], object], lead_us: float) -> float:
        """The device's time from the call's first work to the end of its last, caches cold.

        lead_us: how long the host takes to enqueue it.
        """

    def wall(self, call: Callable[[], object]) -> float:
        """The host's time from an idle device until the call's work is done."""

    def host(self, call: Callable[[], object]) -> float:
        """The host's time until the call returns; its work may still run."""

    def synchronize(self) -> None: ...


class CudaClock:
    """CUDA events. First a write to a buffer of twice the L2, then a device-side wait while the host enqueues the call:
    a span holds no gap in which the device waits for the host.
    """

    def __init__(self, device: torch.device) -> None:
        l2_bytes = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 64 << 20
        self._flush = torch.empty(2 * l2_bytes, dtype=torch.uint8, device=device)
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._cycles_per_us = 1.0
        cycles = 4_000_000
        self.span(lambda: torch.cuda._sleep(cycles), 0)
        self._cycles_per_us = cycles / self.span(lambda: torch.cuda._sleep(cycles), 0)

    def span(self, call: Callable[[], object], lead_us: float) -> float:
        self._flush.zero_()
        torch.cuda._sleep(int(lead_us * self._cycles_per_us))
        self._begin.record()
        call()
        self._end.record()
        self._end.synchronize()
        return self._begin.elapsed_time(self._end) * 1e3

    def wall(self, call: Callable[[], object]) -> float:
        self.synchronize()
        start = time.perf_counter()
        call()
        self.synchronize()
        return (time.perf_counter() - start) * 1e6

    def host(self, call: Callable[[], object]) -> float:
        return _elapsed_us(call)

    def synchronize(self) -> None:
        torch.cuda.synchronize()


class CpuClock:
    """The wall clock; a write to a buffer larger than common last-level caches comes before each span."""

    def __init__(self) -> None:
        self._flush = torch.empty(64 << 20, dtype=torch.uint8)

    def span(self, call: Callable[[], object], lead_us: float) -> float:
        self._flush.zero_()
        return _elapsed_us(call)

    def wall(self, call: Callable[[], object]) -> float:
        return _elapsed_us(call)

    def host(self, call: Callable[[], object]) -> float:
        return _elapsed_us(call)

    def synchronize(self) -> None: ...


def _elapsed_us(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def clock_for(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else CpuClock()


@dataclass(frozen=True)
class Subject:
    """One thing to measure, several times."""

    owner: str
    """The implementation."""
    column: str
    call: Callable[[], object]
    seconds: float
    """How long to measure it, about."""
    on_device: bool = True
    """Measure the device's span; else the host's wall time."""


@dataclass(frozen=True)
class Spread:
    """Median, 20th and 80th percentile in microseconds, of `reps` measurements."""

    us: float
    low: float
    high: float
    reps: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Spread":
        ordered = sorted(samples)
        low, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.2, 0.8))
        return cls(statistics.median(ordered), low, high, len(ordered))


@dataclass(frozen=True)
class _Paced:
    subject: Subject
    lead_us: float
    reps: int

    def in_round(self, number: int, rounds: int) -> bool:
        """Whether this subject's `reps` turns, spread evenly over the rounds, include this one."""
        return (number + 1) * self.reps // rounds > number * self.reps // rounds


def interleave(
    subjects: Sequence[Subject],
    clock: Clock,
    on_turn: Callable[[str], object] = lambda owner: None,
) -> dict[tuple[str, str], Spread]:
    """Measure all subjects in turns; keys are (owner, column).

    on_turn: told the owner of each subject before it is called, so that a hang has a name.
    """
    paced = []
    for subject in subjects:
        on_turn(subject.owner)
        paced.append(_pace(subject, clock))
    rounds = max((p.reps for p in paced), default=0)
    samples: dict[tuple[str, str], list[float]] = {(s.owner, s.column): [] for s in subjects}
    for number in range(rounds):
        for p in paced:
            if p.in_round(number, rounds):
                on_turn(p.subject.owner)
                took = clock.span(p.subject.call, p.lead_us) if p.subject.on_device else clock.wall(p.subject.call)
                samples[p.subject.owner, p.subject.column].append(took)
    return {key: Spread.of(values) for key, values in samples.items()}


def _pace(subject: Subject, clock: Clock) -> _Paced:
    """Warm up, and find how often the subject fits into its seconds."""
    seconds = subject.seconds
    first = clock.wall(subject.call)
    if first > SLOW_US:
        return _Paced(subject, MAX_LEAD_US, min(MIN_REPS, max(MIN_REPS_SLOW, int(seconds * 1e6 / first))))
    clock.wall(subject.call)
    clock.synchronize()
    host = [clock.host(subject.call) for _ in range(3)]
    clock.synchronize()
    lead = min(1.5 * statistics.median(host) + 30, MAX_LEAD_US)
    took = clock.span(subject.call, lead) + lead
    whole = max(_elapsed_us(lambda: clock.span(subject.call, lead)), took)
    return _Paced(subject, lead, max(MIN_REPS, min(MAX_REPS, int(seconds * 1e6 / whole))))


def host_us(call: Callable[[], object], clock: Clock, seconds: float) -> float:
    """Median host time of many calls one after the other, none waited for."""
    took = clock.wall(call)
    calls = max(3, min(HOST_CALLS, int(seconds * 1e6 / max(took, 1.0))))
    times = [clock.host(call) for _ in range(calls)]
    clock.synchronize()
    return statistics.median(times)
