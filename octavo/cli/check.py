"""`octavo check`: the contract on every backend that can run here."""

from collections.abc import Sequence
from typing import Annotated

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from octavo.cli.contract import Case, cases
from octavo.cli.options import console, usage_errors
from octavo.cli.targets import Skip, Target, targets
from octavo.errors import fail

Backend = Annotated[str | None, typer.Option(help="Only this backend; all that can run here if left out.")]
Only = Annotated[str, typer.Option(metavar="TEXT", help="Only cases whose name holds this.", show_default=False)]

Finding = tuple[str, str]
"""("ok", "fail" or "skip", why)."""


def check(backend: Backend = None, only: Only = "") -> None:
    """Hold every backend that can run here to the contract, in small cases full of NaN that must not be read.

    Exits with 1 when a backend breaks it, with 2 when an input is wrong.
    """
    with usage_errors():
        chosen = [case for case in cases() if only in case.name]
        if not chosen:
            fail("--only", "part of a case's name", repr(only), "leave it out to see all")
        held = targets(backend)
    findings = _check_all(chosen, held)
    broken = _report(chosen, held, findings)
    if broken:
        raise typer.Exit(1)


def _check_all(chosen: Sequence[Case], held: Sequence[Target]) -> dict[tuple[str, str], Finding]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    findings = {}
    with Progress(*columns, console=console(stderr=True), transient=True) as progress:
        task = progress.add_task("cases", total=len(chosen) * len(held))
        for target in held:
            for case in chosen:
                progress.update(task, description=f"{target}: {case.name}")
                findings[case.name, str(target)] = check_case(case, target)
                progress.advance(task)
    return findings


@torch.no_grad()
def check_case(case: Case, target: Target) -> Finding:
    """What became of one case. An exception is a broken contract too, and becomes its reason."""
    try:
        why = case.check(target)
    except Skip as skip:
        return "skip", str(skip)
    except Exception as error:
        return "fail", f"{type(error).__name__}: {error}"
    return ("fail", why) if why else ("ok", "")


def _report(chosen: Sequence[Case], held: Sequence[Target], findings: dict[tuple[str, str], Finding]) -> int:
    screen = console()
    table = Table(title="octavo check")
    table.add_column("contract", overflow="fold")
    marks = {"ok": "[green]ok[/]", "fail": "[bold red]FAIL[/]", "skip": "[dim]not served[/]"}
    for target in held:
        table.add_column(str(target))
    for case in chosen:
        table.add_row(case.name, *(marks[findings[case.name, str(target)][0]] for target in held))
    screen.print(table)
    count = dict.fromkeys(marks, 0)
    for (name, held_name), (state, why) in findings.items():
        count[state] += 1
        if state != "ok":
            label, style = ("FAIL", "bold red") if state == "fail" else ("not served", "dim")
            screen.print(f"{label} {name}, {held_name}: {why}", style=style, highlight=False, markup=False)
    skipped = f", {count['skip']} not served" if count["skip"] else ""
    state = (
        f"{count['fail']} of {len(findings)} checks FAIL" if count["fail"] else f"all {count['ok']} checks ok{skipped}"
    )
    screen.print(state, style="bold red" if count["fail"] else "bold green", highlight=False)
    return count["fail"]
