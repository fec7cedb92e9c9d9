"""`octavo compile`: every kernel for every architecture, without a GPU."""

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from octavo.aot import ARCHS, ASYNC_COPIES, TENSOR_CORES, CompiledReport, compile_all, parse_arch
from octavo.cli.options import console, usage_error, usage_errors

Archs = Annotated[
    list[str] | None,
    typer.Option("--arch", help=f"Repeatable; all of {', '.join(ARCHS)} if left out.", show_default=False),
]
Kernel = Annotated[str, typer.Option(metavar="TEXT", help="Only kernels whose name holds this.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def compile_kernels(arch: Archs = None, kernel: Kernel = "", as_json: AsJson = False) -> None:
    """Compile every kernel ahead of time and hold its machine code to what is expected of it. Needs no GPU.

    Shows registers, spills, shared memory, tensor-core and asynchronous-copy instructions. Exits with 1 when an
    expectation fails, with 2 when an input is wrong.
    """
    with usage_errors():
        sms = [parse_arch(name) for name in dict.fromkeys(arch or ARCHS)]
        if importlib.util.find_spec("triton") is None:
            usage_error("triton: expected it installed, got no module triton; fix: pip install 'octavo[triton]'")
    reports = _compile(sms, kernel)
    if not reports:
        usage_error(f"--kernel: expected part of a kernel's name, got {kernel!r}; fix: leave it out to see all names")
    if as_json:
        typer.echo(json.dumps([{**asdict(r), "ok": r.ok} for r in reports], indent=2))
    else:
        _show(reports)
    if not all(r.ok for r in reports):
        raise typer.Exit(1)


def _compile(sms: Sequence[int], kernel: str) -> list[CompiledReport]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    reports = []
    with Progress(*columns, console=console(stderr=True), transient=True) as progress:
        task = progress.add_task("compiling", total=None)
        for item in compile_all(sms, kernel):
            if isinstance(item, int):
                progress.update(task, total=item)
                continue
            reports.append(item)
            progress.update(task, advance=1, description=f"sm_{item.sm} {item.name}")
    return reports


def _show(reports: Sequence[CompiledReport]) -> None:
    screen = console()
    table = Table(title="octavo compile")
    table.add_column("kernel", overflow="fold")
    table.add_column("arch", no_wrap=True)
    for name in ("registers", "spills", "shared"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("tensor cores", "async copies", "result"):
        table.add_column(name, overflow="fold")
    for r in reports:
        table.add_row(
            r.name,
            f"sm_{r.sm}",
            str(r.registers),
            f"{r.spills} B",
            f"{r.shared_bytes / 1024:.1f} KiB",
            _found(r, TENSOR_CORES),
            _found(r, ASYNC_COPIES),
            "[green]ok[/]" if r.ok else "[bold red]FAIL[/]",
        )
    screen.print(table)
    failed = [r for r in reports if not r.ok]
    for r in failed:
        screen.print(
            f"FAIL sm_{r.sm} {r.name}: {'; '.join(r.failures)}", style="bold red", highlight=False, markup=False
        )
    state = f"{len(failed)} of {len(reports)} builds fail" if failed else f"all {len(reports)} builds ok"
    screen.print(state, style="bold red" if failed else "bold green", highlight=False)


def _found(report: CompiledReport, names: Sequence[str]) -> str:
    return ", ".join(f"{n} {report.instructions[n]}" for n in names if n in report.instructions) or "-"
