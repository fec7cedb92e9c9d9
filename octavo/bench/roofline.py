"""What this machine can do at best, measured in a moment: a matrix product and a copy. The roofline of a workload."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from octavo.bench.measure import Clock, CpuClock, Subject, clock_for, interleave
from octavo.bench.workloads import Workload
from octavo.problem import AttentionSpec

_MATMUL_SIZE = {"cpu": 1024, "cuda": 8192}
MEASURE_S, MAX_CPU_RUNS = 0.2, 20
_COPY_BYTES = {"cpu": 1 << 28, "cuda": 1 << 30}


@dataclass(frozen=True)
class Ceilings:
    """Rates that the machine reached: a square matmul in one dtype, and a device copy (bytes read plus written)."""

    flops_per_s: float
    bytes_per_s: float

    def bound_s(self, workload: Workload, spec: AttentionSpec) -> float:
        """Seconds below which the workload can't run: max(flops / peak, bytes / bandwidth)."""
        return max(workload.flops(spec) / self.flops_per_s, workload.bytes(spec) / self.bytes_per_s)


def median_seconds(call: Callable[[], object], clock: Clock, seconds: float) -> float:
    """Median time of `call` on the device, behind a flushed cache, in about `seconds`; it has run once before.

    On a CPU, where a call may take long, once is enough when that takes all the time.
    """
    if not isinstance(clock, CpuClock):
        return interleave([Subject("", "", call, seconds)], clock)["", ""].us / 1e6
    times: list[float] = []
    while sum(times) < seconds * 1e6 and len(times) < MAX_CPU_RUNS:
        times.append(clock.span(call, 0))
    return statistics.median(times) / 1e6


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measure both ceilings; takes a second or two and, on a GPU, 2 GiB of memory for that time."""
    clock = clock_for(device)
    size, copy_bytes = _MATMUL_SIZE[device.type], _COPY_BYTES[device.type]
    a = torch.randn(size, size, device=device, dtype=dtype)
    product = torch.mm(a, a)
    matmul_s = median_seconds(lambda: torch.mm(a, a, out=product), clock, MEASURE_S)
    source = torch.ones(copy_bytes, dtype=torch.uint8, device=device)
    target = source.clone()
    copy_s = median_seconds(lambda: target.copy_(source), clock, MEASURE_S)
    return Ceilings(2 * size**3 / matmul_s, 2 * copy_bytes / copy_s)
