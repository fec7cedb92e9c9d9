"""The command line: one module per command."""

from typing import Annotated

import typer

import octavo
from octavo.cli import bench, check, compile, export, info, report, run

app = typer.Typer(
    name="octavo",
    help="Paged grouped-query attention for LLM serving: run real batches, check the contract, look at the machine.",
    epilog="Start with `octavo run`: real serving batches, timed and verified on this machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"octavo {octavo.__version__}")
        raise typer.Exit()


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Paged grouped-query attention for LLM serving: run real batches, check the contract, look at the machine."""


app.command("run")(run.run)
app.command("check")(check.check)
app.command("info")(info.info)
app.command("compile")(compile.compile_kernels)
app.command("bench")(bench.bench)
app.command("report")(report.report)
app.command("export")(export.export)
