"""`octavo info`: versions, devices, and each backend with why it is or isn't used."""

import os
import platform
from importlib import metadata
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import octavo
from octavo.backends import BACKENDS, arch_of, resolve
from octavo.cli.jobs import DEFAULT_SPEC
from octavo.cli.options import console

PACKAGES = ("torch", "triton", "typer", "rich", "safetensors", "numpy")


def info() -> None:
    """Show versions, devices, and each backend with why it is or isn't used. Works without Triton and without a GPU."""
    screen = console()
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
