"""One case in one process: `python -m octavo.bench.worker` reads a request from stdin and answers in JSON lines.

A request is {"action": "probe" | "case", ...}; see `runner.py`. Answers go to the stdout that the process was started
with; whatever a library prints goes to stderr.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from importlib import metadata
from typing import Any, TextIO

import torch

import octavo
from octavo.bench.gate import Gate, same_bits
from octavo.bench.implementations import Implementation, Prepared, Result, Unsupported, find
from octavo.bench.measure import Clock, Spread, Subject, clock_for, host_us, interleave
from octavo.bench.problems import Problem
from octavo.bench.roofline import measure_ceilings
from octavo.bench.runner import TIMING, TURN_BYTES
from octavo.bench.workloads import make_inputs

PROTOCOL = 1
PART = 0.4
"""Share of the judged figure's time that the others get."""
Emit = Callable[..., None]


def main() -> int:
    request = json.load(sys.stdin)
    return respond(request, request["turn_file"])


def respond(request: Mapping[str, Any], turn_file: int) -> int:
    """Do what is asked and answer on stdout; returns the process's exit code.

    turn_file: descriptor of the file that says whose turn it is.
    """
    emit = _emitter()
    device = torch.device(request["device"])
    if request.get("threads"):
        torch.set_num_threads(request["threads"])
    report = partial(emit, "stage", stage="import")
    present, absent = find(
        request["impls"], request.get("peers"), request.get("adapters"), lambda name: report(impl=name)
    )
    if request["action"] == "probe":
        emit("probe", **_probe(device, request["dtype"], present, absent))
        return 0
    for name, reason in absent.items():
        emit("error", impl=name, error=f"cannot be imported: {reason}")
    with torch.no_grad():
        return _Case(request, emit, partial(_write_turn, turn_file)).run(present)


def _emitter() -> Emit:
    """A function that writes one JSON line to the original stdout; file descriptor 1 now leads to stderr."""
    answers: TextIO = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def emit(event: str, **fields: object) -> None:
        answers.write(json.dumps({"event": event, **fields}) + "\n")

    return emit


def _write_turn(descriptor: int, name: str) -> None:
    """Whose turn it is, into a file: an answer would wake the parent between measurements."""
    os.pwrite(descriptor, name.encode().ljust(TURN_BYTES), 0)


def _probe(
    device: torch.device, dtype: str, present: Mapping[str, Implementation], absent: Mapping[str, str]
) -> dict[str, Any]:
    ceilings = measure_ceilings(device, getattr(torch, dtype))
    return {
        "protocol": PROTOCOL,
        "card": _card(device),
        "sms": torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0,
        "ceilings": {"tflops": ceilings.flops_per_s / 1e12, "gbps": ceilings.bytes_per_s / 1e9},
        "libraries": _libraries(),
        "present": {name: dict(found.versions) for name, found in present.items()},
        "absent": dict(absent),
    }


def _card(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def _libraries() -> dict[str, str]:
    """Versions of what every implementation runs on."""
    found = {"octavo": octavo.__version__, "torch": torch.__version__}
    for name in ("triton", "nvidia-cudnn-cu13"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


PEERS_LSE_SLACK = 2.0**-8
"""Some peers take fast approximations to lse, and test it to 1e-3: their out is held to the rule, their lse to this."""


class _Case:
    """Prepare, check and time every implementation of one problem."""

    def __init__(self, request: Mapping[str, Any], emit: Emit, on_turn: Callable[[str], None]) -> None:
        problem, device = Problem.from_json(request["problem"]), torch.device(request["device"])
        self.device, self.emit, self.on_turn = device, emit, on_turn
        self.seconds, self.budget = request["seconds"], request.get("seconds_per_impl")
        self.clock: Clock = clock_for(device)
        inputs = make_inputs(problem.workload, problem.spec, device, seed=problem.seed, scattered=problem.scattered)
        self.gate = Gate.of(inputs)
        self._stage = ("", "")
        self._checked: dict[str, Result] = {}

    def run(self, implementations: Mapping[str, Implementation]) -> int:
        """0, or 3 when an implementation broke the device for this process; the caller then goes on without it."""
        ready: dict[str, Prepared] = {}
        for name, implementation in implementations.items():
            try:
                ready[name] = self._prepare(implementation)
            except Unsupported as reason:
                self.emit("unsupported", impl=name, reason=str(reason))
            except Exception as error:  # one implementation's failure must not lose the others
                self.emit("error", impl=name, error=f"{self._stage[1]}: {type(error).__name__}: {error}"[:600])
                if not self._device_alive():
                    return 3
        self._enter("", TIMING)
        subjects = [s for name, prepared in ready.items() for s in self._subjects(name, prepared)]
        spreads = interleave(subjects, self.clock, self.on_turn)
        for name, prepared in ready.items():
            self.emit("result", impl=name, **self._result(name, prepared, spreads))
        return 0

    def _enter(self, name: str, stage: str) -> None:
        if (name, stage) != self._stage:
            self._stage = (name, stage)
            self.emit("stage", impl=name, stage=stage)

    def _prepare(self, implementation: Implementation) -> Prepared:
        """Ready and checked. Raises when a result is wrong."""
        name = implementation.name
        self._enter(name, "prepare")
        prepared = implementation.make(self.gate.inputs)
        self._enter(name, "first call")
        _whole(prepared)()
        self.clock.synchronize()
        self._enter(name, "check")
        slack = 0.0 if name.startswith("octavo") else PEERS_LSE_SLACK
        for call in filter(None, (_whole(prepared), prepared.call)):
            verdict, result = self.gate.check(prepared, call, self._checked.get(name), slack)
            if not verdict.ok:
                raise ValueError(verdict.message)
            # The bits that later calls are held to are those of a plan and its run: one call may take another kernel.
            self._checked.setdefault(name, result)
        return prepared

    def _device_alive(self) -> bool:
        try:
            self.clock.synchronize()
        except RuntimeError:
            return False
        return True

    def _result(self, name: str, prepared: Prepared, spreads: Mapping[tuple[str, str], Spread]) -> dict[str, Any]:
        self._enter(name, "host time")
        judged = spreads[name, "us"]
        again = prepared.canonical(_whole(prepared)())
        result: dict[str, Any] = {
            "us": judged.us,
            "us_low": judged.low,
            "us_high": judged.high,
            "reps": judged.reps,
            "repeats": same_bits(again, self._checked[name]),
            "backend": prepared.backend,
        }
        for column in ("run_us", "call_us", "plan_us", "step_us"):
            if (name, column) in spreads:
                result[column] = spreads[name, column].us
        if self.device.type == "cuda":
            seconds = PART * self._seconds_per_figure(prepared)
            result["host_us"] = host_us(prepared.run, self.clock, seconds)
            if prepared.plan is not None:
                result["plan_host_us"] = host_us(prepared.plan, self.clock, seconds)
        return result

    def _subjects(self, name: str, prepared: Prepared) -> Iterator[Subject]:
        """`us` first: planning counts where it is the device's work. The parts follow."""
        seconds, plan = self._seconds_per_figure(prepared), prepared.plan
        whole = _whole(prepared) if prepared.plan_on_device else prepared.run
        yield Subject(name, "us", whole, seconds)
        if prepared.plan_on_device:
            yield Subject(name, "run_us", prepared.run, PART * seconds)
        if prepared.call is not None:
            yield Subject(name, "call_us", prepared.call, PART * seconds)
        if plan is not None:
            yield Subject(name, "plan_us", plan, PART * seconds, prepared.plan_on_device)
            yield Subject(name, "step_us", _whole(prepared), PART * seconds, on_device=False)

    def _seconds_per_figure(self, prepared: Prepared) -> float:
        """What the judged figure gets; the others get PART of it."""
        if self.budget is None:
            return float(self.seconds)
        on_host = self.device.type == "cuda"
        parts = [
            prepared.plan_on_device,
            prepared.call,
            prepared.plan,
            prepared.plan,
            on_host,
            on_host and prepared.plan,
        ]
        return float(self.budget / (1 + PART * sum(map(bool, parts))))


def _whole(prepared: Prepared) -> Callable[[], Any]:
    """Plan, then run."""
    plan, run = prepared.plan, prepared.run
    if plan is None:
        return run

    def whole() -> object:
        plan()
        return run()

    return whole


if __name__ == "__main__":
    sys.exit(main())
