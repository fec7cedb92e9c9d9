"""`octavo report`: benchmark results as a terminal table and one self-contained HTML page."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from octavo.bench import results
from octavo.bench.charts import speed_chart
from octavo.bench.report import html_page
from octavo.bench.summary import Summary, summarize
from octavo.bench.table import closing_lines, results_table
from octavo.cli.options import console, usage_errors

Files = Annotated[
    list[Path] | None,
    typer.Argument(help="Results files; all of benchmarks/results if left out.", show_default=False),
]
Html = Annotated[Path | None, typer.Option(help="Write the page here.")]
Svg = Annotated[Path | None, typer.Option(help="Write the first run's speed chart here, as a picture of its own.")]
Run = Annotated[str | None, typer.Option(help="Run id; the last run of each file if left out.")]


def report(files: Files = None, html: Html = None, svg: Svg = None, run: Run = None) -> None:
    """Show recorded benchmark results: a table here, and with --html a page with charts."""
    with usage_errors():
        paths = files or sorted(results.RESULTS_FOLDER.glob("*.jsonl"))
        summaries = list(_summaries(paths, run))
        for summary in summaries:
            console().print(results_table(summary))
            for line in closing_lines(summary):
                typer.echo(line)
        if html is not None:
            _write(html, html_page(summaries))
        if svg is not None:
            _write(svg, speed_chart(summaries[0]))


def _summaries(paths: Sequence[Path], run: str | None) -> Iterator[Summary]:
    found = [records for path in paths if (records := results.of_run(results.read(path), run))]
    if not found:
        where = ", ".join(str(path) for path in paths) or str(results.RESULTS_FOLDER)
        raise ValueError(f"results: expected a run in {where}, found none; fix: run `octavo bench`, or check --run")
    yield from (summarize(records) for records in found)


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    typer.echo(f"written: {path}")
