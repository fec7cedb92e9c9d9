"""`octavo run`: real serving batches through paged attention, timed and verified."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from octavo.backends import arch_of, resolve
from octavo.cli.execute import Executor, Result
from octavo.cli.jobs import Job, JobOptions, load_jobs
from octavo.cli.options import console, given_fields, option, parse_device, usage_error, usage_errors

_SHAPE = "The problem"
_HOW = "How to run it"


_option = functools.partial(option, show_default=False)

_FILES = "JSON lines of {qo_lens, kv_lens}, or FlashInfer-Trace folders; the sample of real batches if left out."
Files = Annotated[list[Path] | None, typer.Argument(metavar="FILE", help=_FILES, show_default=False)]
QoHeads = Annotated[int | None, _option(_SHAPE, "Query heads; 32 if left out.")]
KvHeads = Annotated[int | None, _option(_SHAPE, "K/V heads, a divisor of the query heads; 4 if left out.")]
HeadDim = Annotated[int | None, _option(_SHAPE, "Elements per query and key head, 16 to 256; 128 if left out.")]
ValueDim = Annotated[int | None, _option(_SHAPE, "Elements per value head; as --head-dim if left out.")]
PageSize = Annotated[int | None, _option(_SHAPE, "Keys per page; 1 if left out.")]
Dtype = Annotated[str | None, _option(_SHAPE, "bf16, fp16 or fp32; bf16 if left out.")]
Causal = Annotated[
    bool | None, _option(_SHAPE, "Mask, bottom-right aligned; causal if left out.", "--causal/--no-causal")
]
Scattered = Annotated[
    bool | None, _option(_SHAPE, "Page ids at random or in a row; at random if left out.", "--scattered/--contiguous")
]
Seed = Annotated[int, _option(_SHAPE, "Draws the tensors, the page order and the rows to verify.", show_default=True)]
Limit = Annotated[int | None, _option(_HOW, "Run only the first N batches.", min=1, metavar="N")]
_MAX_PAIRS = (
    "Scale each batch down to about N visible (query, key) pairs; 0 runs all whole. "
    "If left out, the sample is scaled down on a CPU and all else runs whole."
)
MaxPairs = Annotated[int | None, _option(_HOW, _MAX_PAIRS, min=0, metavar="N")]
Device = Annotated[
    str, _option(_HOW, "auto, cpu, cuda or cuda:N; auto takes the GPU where there is one.", show_default=True)
]
Backend = Annotated[str | None, _option(_HOW, "Backend to use, see `octavo info`; chosen if left out.")]
Out = Annotated[Path | None, _option(_HOW, "Write each batch's out and lse there as safetensors.", metavar="DIR")]


def run(
    files: Files = None,
    *,
    qo_heads: QoHeads = None,
    kv_heads: KvHeads = None,
    head_dim: HeadDim = None,
    value_dim: ValueDim = None,
    page_size: PageSize = None,
    dtype: Dtype = None,
    causal: Causal = None,
    scattered: Scattered = None,
    device: Device = "auto",
    backend: Backend = None,
    seed: Seed = 0,
    limit: Limit = None,
    max_pairs: MaxPairs = None,
    out: Out = None,
) -> None:
    """Run real serving batches through paged attention: timed, and verified against a float64 oracle.

    Exits with 1 when a row is wrong, with 2 when an input is.
    """
    with usage_errors():
        spec = given_fields(qo_heads, kv_heads, head_dim, value_dim, page_size, causal, dtype)
        target = parse_device(device)
        jobs, remarks = load_jobs(files or [], JobOptions(spec, scattered, max_pairs, target))
        jobs = jobs[:limit]
        for each in {job.spec for job in jobs}:
            resolve(each, arch_of(target), backend)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
    executor = Executor(target, backend, seed, out)
    results = _run_all(executor, jobs)
    _report(console(), executor, results, remarks)
    if not all(result.verdict.ok for result in results):
        raise typer.Exit(1)


def _run_all(executor: Executor, jobs: Sequence[Job]) -> list[Result]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    results = []
    with Progress(*columns, console=console(stderr=True), transient=True) as progress:
        task = progress.add_task("batches", total=len(jobs))
        for job in jobs:
            progress.update(task, description=job.workload.name)
            try:
                results.append(executor.run(job))
            except torch.OutOfMemoryError:
                progress.stop()
                usage_error(
                    f"{job.workload.name}: expected to fit on {executor.device}, got out of memory; fix: --max-pairs N"
                )
            progress.advance(task)
    return results


def _report(screen: Console, executor: Executor, results: Sequence[Result], remarks: Sequence[str]) -> None:
    screen.print(_table(executor, results))
    for remark in remarks:
        screen.print(remark, highlight=False)
    scaled = sum(r.job.scaled for r in results)
    if scaled:
        screen.print(f"{scaled} of {len(results)} batches are scaled down (marked *). --max-pairs 0 runs them whole.")
    wrong = [r for r in results if not r.verdict.ok]
    for result in wrong:
        screen.print(f"WRONG {result.job.workload.name}: {result.verdict.message}", style="bold red", highlight=False)
    rows = sum(r.verdict.rows for r in results)
    dead = sum(r.verdict.dead_rows for r in results)
    worst = max((r.verdict.worst for r in results), default=0.0)
    state = f"{len(wrong)} of {len(results)} batches WRONG" if wrong else f"all {len(results)} batches right"
    screen.print(
        f"{state}: {rows} token rows compared ({dead} see no key), all heads each; largest error {worst:.2f} of what "
        "the rule allows",
        style="bold red" if wrong else "bold green",
        highlight=False,
    )
    if executor.out is not None:
        screen.print(
            f"out and lse of each batch: {executor.out}{'/' if executor.out.name else ''}*.safetensors", highlight=False
        )


def _table(executor: Executor, results: Sequence[Result]) -> Table:
    device = executor.device
    table = Table(title=f"octavo run on {arch_of(device).name}", caption=_caption(executor), caption_justify="left")
    table.add_column("batch", overflow="fold")
    for name in ("seqs", "tokens", "keys"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("backend", no_wrap=True)
    for name in ("time", "TFLOP/s", "GB/s", "roofline"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verified", no_wrap=True)
    for r in results:
        w, verdict = r.job.workload, r.verdict
        table.add_row(
            w.name + (" *" if r.job.scaled else ""),
            str(len(w.qo_lens)),
            str(w.num_tokens),
            str(sum(w.kv_lens)),
            r.backend,
            _duration(r.seconds),
            f"{r.tflops:.3g}",
            f"{r.gbytes_per_s:.3g}",
            f"{100 * r.roofline_share:.3g} %",
            f"[green]{verdict.rows} rows[/]" if verdict.ok else "[bold red]WRONG[/]",
        )
    return table


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def _caption(executor: Executor) -> str:
    how = "CUDA events, L2 flushed before each run" if executor.device.type == "cuda" else "wall clock"
    lines = [
        f"time: BatchAttention.plan + run, median, {how}, after a warm-up. TFLOP/s counts visible (query, key) "
        "pairs alone; GB/s the least traffic possible.",
    ]
    for dtype, c in executor.ceilings.items():
        name = str(dtype).removeprefix("torch.")
        lines.append(
            f"roofline: max(flops / peak, bytes / bandwidth) / time, with peak {c.flops_per_s / 1e12:.3g} TFLOP/s "
            f"({name} matmul) and bandwidth {c.bytes_per_s / 1e9:.4g} GB/s (copy), both measured just now."
        )
    return "\n".join(lines)
