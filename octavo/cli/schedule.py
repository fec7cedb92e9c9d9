"""What `octavo info --batch` shows: how batches would be scheduled on a GPU, without one."""

from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from octavo.backends import arch_of
from octavo.bench.roofline import measure_ceilings
from octavo.bench.schedule_picture import schedule_chart
from octavo.bench.schedules import DEVICE_BACKENDS, draw
from octavo.cli.jobs import Job
from octavo.errors import fail
from octavo.planning.picture import H200_SMS, Machine, describe
from octavo.problem import Arch, AttentionSpec


@dataclass(frozen=True)
class ScheduleOptions:
    sms: int | None
    backend: str | None
    batch_invariant: bool
    plot: Path | None


def show_schedules(screen: Console, jobs: list[Job], options: ScheduleOptions) -> None:
    """Print each job's schedule, and draw it where asked. Raises ValueError about options."""
    if options.backend not in (None, *DEVICE_BACKENDS):
        fail("--backend", f"one of {', '.join(DEVICE_BACKENDS)}", repr(options.backend), "others make no schedule")
    arch = _arch(options.sms)
    machines: dict[torch.dtype, Machine] = {}
    for number, job in enumerate(jobs, 1):
        spec = job.spec
        if spec.dtype not in machines:
            machines[spec.dtype] = _machine(spec, arch)
        backend, invariant = options.backend, options.batch_invariant
        name, form, seen = draw(job.workload, spec, arch, machines[spec.dtype], backend, invariant)
        w = job.workload
        sizes = f"{len(w.qo_lens)} sequences, {w.num_tokens} tokens, {sum(w.kv_lens)} keys"
        screen.print(f"[bold]{w.name}[/]: {sizes}", highlight=False)
        screen.print(f"{'backend':10}{name} on {arch.name}, {arch.num_sms} SMs", highlight=False)
        screen.print(f"{'tiles':10}{form.describe()}", highlight=False)
        for line in describe(seen):
            screen.print(line, highlight=False, markup=False)
        if options.plot is not None:
            path = _plot_path(options.plot, number, len(jobs))
            path.write_text(schedule_chart(seen, w.name))
            screen.print(f"{'picture':10}{path}", highlight=False, markup=False)
        screen.print()


def _arch(sms: int | None) -> Arch:
    """This machine's GPU, or an H200 where there is none; with as many SMs as asked for."""
    if torch.cuda.is_available():
        found = arch_of(torch.device("cuda"))
        return Arch(found.kind, found.capability, sms or found.num_sms, found.name)
    return Arch("cuda", (9, 0), sms or H200_SMS, "NVIDIA H200 (no GPU here)")


def _machine(spec: AttentionSpec, arch: Arch) -> Machine:
    """Rates measured just now, where there is a GPU; else recorded ones of an H200."""
    if not torch.cuda.is_available():
        return Machine.h200(spec, arch.num_sms)
    device = torch.device("cuda")
    ceilings = measure_ceilings(device, spec.dtype)
    share = arch.num_sms / arch_of(device).num_sms
    return Machine(arch.num_sms, ceilings.flops_per_s * share, ceilings.bytes_per_s)


def _plot_path(path: Path, number: int, count: int) -> Path:
    return path if count == 1 else path.with_name(f"{path.stem}-{number}{path.suffix or '.svg'}")
