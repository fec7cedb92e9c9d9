"""`octavo info`: versions, devices, and each backend with why it is or isn't used; or the schedule of batches."""

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Annotated

import torch
from rich.console import Console
from rich.table import Table

import octavo
from octavo.backends import BACKENDS, arch_of, resolve
from octavo.cli.jobs import DEFAULT_SPEC, JobOptions, load_jobs
from octavo.cli.options import console, given_fields, option, usage_errors
from octavo.cli.run import Causal, Dtype, HeadDim, KvHeads, Limit, PageSize, QoHeads, ValueDim
from octavo.cli.schedule import ScheduleOptions, show_schedules
from octavo.errors import fail

PACKAGES = ("torch", "triton", "typer", "rich", "safetensors", "numpy")
_PANEL = "The schedule of batches"

_FILE = "Show how these would be scheduled: JSON lines of {qo_lens, kv_lens}, or a FlashInfer-Trace folder. Repeatable."
BatchFiles = Annotated[list[Path] | None, option(_PANEL, _FILE, "--batch", metavar="FILE", show_default=False)]
_PLOT = "Draw which SM works on what, when, as SVG; with several batches FILE-1.svg, FILE-2.svg and so on."
PlotFile = Annotated[Path | None, option(_PANEL, _PLOT, "--plot", metavar="FILE.svg", show_default=False)]
_SMS = "SMs to plan for; this GPU's, or an H200's 132, if left out."
Sms = Annotated[int | None, option(_PANEL, _SMS, "--sms", min=1, show_default=False)]
_PLANNER = "hopper or triton: whose tiles to plan; the preferred one's if left out."
Planner = Annotated[str | None, option(_PANEL, _PLANNER, "--backend", show_default=False)]
Invariant = Annotated[bool, option(_PANEL, "Tiles and cuts of a sequence follow from it alone.", "--batch-invariant")]


def info(
    batch: BatchFiles = None,
    *,
    plot: PlotFile = None,
    sms: Sms = None,
    backend: Planner = None,
    batch_invariant: Invariant = False,
    qo_heads: QoHeads = None,
    kv_heads: KvHeads = None,
    head_dim: HeadDim = None,
    value_dim: ValueDim = None,
    page_size: PageSize = None,
    dtype: Dtype = None,
    causal: Causal = None,
    limit: Limit = None,
) -> None:
    """Show versions, devices, and each backend with why it is or isn't used; or, with --batch, the schedule of batches.

    Works without Triton and without a GPU. A schedule is the planner's for a GPU, from lengths alone: its items and
    their balance, and the time it predicts beside the roofline. Exits with 2 when an input is wrong.
    """
    screen = console()
    with usage_errors():
        spec = given_fields(qo_heads, kv_heads, head_dim, value_dim, page_size, causal, dtype)
        if batch:
            jobs, remarks = load_jobs(batch, JobOptions(spec, None, None, torch.device("meta")))
            show_schedules(screen, jobs[:limit], ScheduleOptions(sms, backend, batch_invariant, plot))
            for remark in remarks:
                screen.print(remark, highlight=False)
            return
        if spec or plot or sms or backend or batch_invariant or limit:
            fail("--batch", "a file of batches with options about their schedule", "none", "octavo info --batch FILE")
    _show_machine(screen)


def _show_machine(screen: Console) -> None:
    screen.print(_versions())
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices += [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    screen.print(_devices(devices))
    for device in devices:
        _show_backends(screen, device)
    if len(devices) == 1:
        screen.print("PyTorch finds no CUDA device here, so everything runs on the CPU.", highlight=False)


def _versions() -> Table:
    table = Table(title="versions")
    table.add_column("what")
    table.add_column("version")
    table.add_row("octavo", octavo.__version__)
    table.add_row("Python", f"{platform.python_version()} on {platform.platform()}")
    for name in PACKAGES:
        table.add_row(name, _version(name))
    runtime = (
        f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}" if torch.version.hip else ""
    )
    table.add_row("torch built for", runtime or "CPU alone")
    return table


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _devices(devices: list[torch.device]) -> Table:
    table = Table(title="devices")
    for name in ("device", "name", "compute capability", "SMs or threads", "memory"):
        table.add_column(name)
    for device in devices:
        arch = arch_of(device)
        if device.type == "cpu":
            table.add_row("cpu", _cpu_name(), "-", f"{torch.get_num_threads()} threads", _ram())
            continue
        memory = torch.cuda.get_device_properties(device).total_memory
        table.add_row(str(device), arch.name, f"sm_{arch.sm}", f"{arch.num_sms} SMs", f"{memory / 2**30:.1f} GiB")
    return table


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        if names:
            return names[0]
    return platform.processor() or platform.machine()


def _ram() -> str:
    try:
        return f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB"
    except (AttributeError, ValueError, OSError):
        return "unknown"


def _show_backends(screen: Console, device: torch.device) -> None:
    arch = arch_of(device)
    spec = DEFAULT_SPEC
    dtype = str(spec.dtype).removeprefix("torch.")
    heads = f"{spec.num_qo_heads} query and {spec.num_kv_heads} K/V heads, head_dim {spec.head_dim}, {dtype}"
    table = Table(title=f"backends on {device} ({arch.kind})", caption=f"for {heads}", caption_justify="left")
    for name in ("backend", "used", "why"):
        table.add_column(name, overflow="fold")
    try:
        choice = resolve(spec, arch)
        used, reasons = choice.backend.name, dict(choice.rejected)
    except ValueError:
        used, reasons = "", {b.name: b.reject(spec, arch) or "" for b in BACKENDS}
    for backend in BACKENDS:
        chosen = backend.name == used
        why = "first in order of preference that serves this" if chosen else reasons.get(backend.name, "")
        table.add_row(backend.name, "[green]yes[/]" if chosen else "no", why)
    screen.print(table)
