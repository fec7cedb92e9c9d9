"""`octavo export`: Octavo's kernels in the form that other tools take."""

from pathlib import Path
from typing import Annotated

import typer

from octavo.cli.options import usage_error, usage_errors
from octavo.errors import fail
from octavo.integrations import flashinfer_bench

FORMATS = ("flashinfer-bench",)
Format = Annotated[str, typer.Argument(help=f"One of: {', '.join(FORMATS)}.", show_default=False)]
Folder = Annotated[Path, typer.Argument(help="Folder to write to.", show_default=False)]
Definition = Annotated[
    list[str] | None, typer.Option(help="gqa_paged_decode_h32_kv8_d128_ps1, say; those of the public set if left out.")
]


def export(form: Format, folder: Folder, definition: Definition = None) -> None:
    """Write Octavo's kernels as self-contained files for another tool. See docs/benchmarks.md."""
    with usage_errors():
        if form not in FORMATS:
            fail("FORM", f"one of {', '.join(FORMATS)}", repr(form), "octavo export flashinfer-bench DIR")
        try:
            written = flashinfer_bench.export(folder, tuple(definition or flashinfer_bench.DEFINITIONS))
        except ImportError as error:
            usage_error(str(error))
    for path in written:
        typer.echo(f"written: {path}")
