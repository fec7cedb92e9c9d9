"""What `octavo run` is to compute: batches of the shipped sample, of JSON lines or of a FlashInfer-Trace folder."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from octavo.bench.trace import TraceBatch, is_trace, read_trace
from octavo.bench.workloads import Inputs, Workload, make_inputs, read_jsonl, sample
from octavo.errors import fail
from octavo.problem import AttentionSpec

CPU_SAMPLE_PAIRS = 200_000
CPU_SAMPLE_LENGTHS = 24_000
"""Bounds that the shipped sample is scaled down to on a CPU, per batch."""

DEFAULT_SPEC = AttentionSpec(num_qo_heads=32, num_kv_heads=4, head_dim=128)


@dataclass(frozen=True)
class Job:
    """One batch to run."""

    workload: Workload
    spec: AttentionSpec
    full: Workload
    """The batch before scaling down."""
    scattered: bool = True
    trace: TraceBatch | None = None

    @property
    def sm_scale(self) -> float | None:
        return self.trace.sm_scale if self.trace else None

    @property
    def scaled(self) -> bool:
        return self.workload != self.full

    def make_inputs(self, device: torch.device, seed: int) -> Inputs:
        if self.trace:
            return self.trace.make_inputs(device, seed)
        return make_inputs(self.workload, self.spec, device, seed=seed, scattered=self.scattered)


@dataclass(frozen=True)
class JobOptions:
    """Options of `octavo run` that shape its jobs; None where the user left one out."""

    spec: dict[str, Any]
    """Fields of AttentionSpec that were given."""
    scattered: bool | None
    max_pairs: int | None
    device: torch.device

    @property
    def scales_sample(self) -> bool:
        """Whether the sample is scaled down because it runs on a CPU."""
        return self.max_pairs is None and self.device.type == "cpu"


def load_jobs(files: Sequence[Path], options: JobOptions) -> tuple[list[Job], list[str]]:
    """(jobs, remarks to show). Raises ValueError, TypeError or OSError about files and options."""
    remarks: list[str] = []
    if not files:
        if options.scales_sample:
            pairs, lengths = f"{CPU_SAMPLE_PAIRS:,} visible pairs", f"{CPU_SAMPLE_LENGTHS:,} tokens plus keys"
            remarks.append(f"On a CPU the sample runs at about {pairs} and {lengths} a batch at most.")
        return _workload_jobs(sample(), options, from_sample=True), remarks
    jobs: list[Job] = []
    for path in files:
        if path.is_dir():
            jobs += _trace_jobs(path, options, remarks)
        else:
            workloads = read_jsonl(path)
            if not workloads:
                fail(path, "at least one batch", "none", "one JSON object a line")
            jobs += _workload_jobs(workloads, options, from_sample=False)
    return jobs, remarks


def _workload_jobs(workloads: Sequence[Workload], options: JobOptions, *, from_sample: bool) -> list[Job]:
    spec = replace(DEFAULT_SPEC, **{"value_dim": None, **options.spec})
    bounds: tuple[int, ...] = (options.max_pairs,) if options.max_pairs else ()
    if from_sample and options.scales_sample:
        bounds = (CPU_SAMPLE_PAIRS, CPU_SAMPLE_LENGTHS)
    scattered = options.scattered is not False
    return [Job(w.shrunk(*bounds) if bounds else w, spec, w, scattered) for w in workloads]


def _trace_jobs(path: Path, options: JobOptions, remarks: list[str]) -> list[Job]:
    if not is_trace(path):
        raise ValueError(
            f"{path}: expected a FlashInfer-Trace folder with definitions/ and workloads/, got a folder without; "
            "fix: pass its root, or a file of JSON lines"
        )
    given = (
        sorted(options.spec) + ["scattered"] * (options.scattered is not None) + ["max_pairs"] * bool(options.max_pairs)
    )
    if given:
        raise ValueError(
            f"{path}: expected no {', '.join(given)} with a FlashInfer-Trace folder, got them; "
            "fix: leave them out, the trace's definitions and page tables say these"
        )
    batches, skipped = read_trace(path)
    if skipped:
        remarks.append(f"{path}: skipped {len(skipped)} definitions that are not grouped-query attention")
    return [Job(b.workload, b.spec, b.workload, trace=b) for b in batches]
