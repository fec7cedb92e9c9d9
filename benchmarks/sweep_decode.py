"""Tiles of short sequences: key block, warps, pipeline stages, programs per SM, on decode and tiny batches.

    python benchmarks/sweep_decode.py [--rows 5] [--workers 12]

Needs one CUDA device; takes about a minute. Times are the device's, in us, planning included, caches cold; every
configuration is held to the float64 reference before it is timed. `planned` is two launches, `inline` one.
"""

import argparse
import itertools
import os
import statistics
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import torch

from octavo import AttentionSpec
from octavo.backends import AttentionCall
from octavo.backends.portable import DEFAULT_TUNING, Tuning
from octavo.backends.triton import TritonBackend
from octavo.bench.measure import CudaClock
from octavo.bench.workloads import Inputs, Workload, make_inputs
from octavo.planning.tiles import SMALL_ROWS, TileConfig
from octavo.reference import reference

SPEC = AttentionSpec(32, 4, 128)
BATCHES = {
    "1 x 1/32k": ((1,), (32768,)),
    "16 x 1/4k": ((1,) * 16, (4096,) * 16),
    "64 x 1/4k": ((1,) * 64, (4096,) * 64),
    "256 x 1/2k": ((1,) * 256, (2048,) * 256),
    "1 x 16/16": ((16,), (16,)),
    "1 x 128/128": ((128,), (128,)),
}
TILES = (
    (32, 2, 2), (32, 2, 4), (32, 4, 4), (64, 2, 3), (64, 4, 2), (64, 4, 3), (64, 4, 4),
    (128, 4, 1), (128, 4, 2), (128, 4, 3), (128, 8, 2), (128, 8, 3),
)  # fmt: skip
PROGRAMS = (1, 2, 3, 4)
LEAD_US, REPEATS = 150, 15


def tunings() -> dict[str, Tuning]:
    found = {"default": DEFAULT_TUNING, "default, planned": Tuning(inline=False)}
    for (block_n, warps, stages), programs, inline in itertools.product(TILES, PROGRAMS, (False, True)):
        tile = TileConfig(SMALL_ROWS, block_n, warps, stages)
        name = f"{'inline ' if inline else 'planned'} n{block_n:<3} w{warps} s{stages} x{programs}"
        found[name] = Tuning(small_tile=tile, small_programs=programs, inline=inline)
    return found


def inputs_of(name: str) -> Inputs:
    return make_inputs(Workload(name, *BATCHES[name]), SPEC, "cuda", seed=0)


def call_of(x: Inputs) -> AttentionCall:
    out = torch.full((x.q.shape[0], SPEC.num_qo_heads, SPEC.v_dim), float("nan"), dtype=SPEC.dtype, device="cuda")
    lse = torch.full(out.shape[:2], float("nan"), device="cuda")
    return AttentionCall(SPEC, x.batch, x.q, x.kv.k_cache, x.kv.v_cache, out, lse, SPEC.default_scale)


def compile_share(names: list[str]) -> None:
    """Fill Triton's cache on disk with what these configurations need."""
    for batch in ("1 x 16/16", "16 x 1/4k"):
        call = call_of(inputs_of(batch))
        for name in names:
            try:
                TritonBackend(tunings()[name]).attend(call)
            except Exception as error:  # a tile that does not fit the device is left out, here and when timed
                print(f"left out: {name}: {type(error).__name__}")


def is_right(call: AttentionCall, rows: list[int], expected: tuple[torch.Tensor, torch.Tensor]) -> bool:
    out, lse = call.out[rows].double().cpu(), call.lse[rows].double().cpu()
    want, want_lse = expected[0].double().cpu(), expected[1].double().cpu()
    written = bool(call.out.isfinite().all() and call.lse.isfinite().all())
    return written and bool(
        (out - want).abs().max() <= 2**-7 * want.abs().max() and (lse - want_lse).abs().max() < 1e-3
    )


def sweep(batch: str, clock: CudaClock, rows: int) -> None:
    x = inputs_of(batch)
    tokens = x.q.shape[0]
    checked = sorted({0, tokens // 3, tokens - 1})
    expected = reference(SPEC, x.q, x.kv.k_cache, x.kv.v_cache, x.batch, None, checked)
    times: list[tuple[float, str]] = []
    for name, tuning in tunings().items():
        backend, call = TritonBackend(tuning), call_of(x)
        try:
            backend.attend(call)
        except Exception:  # reported while compiling
            continue
        if not is_right(call, checked, expected):
            print(f"{batch}: WRONG: {name}")
            continue
        spans = [clock.span(partial(backend.attend, call), LEAD_US) for _ in range(REPEATS)]
        times.append((statistics.median(spans[3:]), name))
    moved = Workload(batch, *BATCHES[batch]).bytes(SPEC)
    print(f"\n{batch}  ({len(times)} configurations)")
    for i, (us, name) in enumerate(sorted(times)):
        if i < rows or name.startswith("default"):
            print(f"  {i + 1:>3}. {us:8.1f} us {moved / us / 1e6:6.2f} TB/s  {name}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=5, help="fastest configurations to print a batch")
    parser.add_argument("--workers", type=int, default=min(12, os.cpu_count() or 1), help="processes that compile")
    options = parser.parse_args()
    names = list(tunings())
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_share, [names[i :: options.workers] for i in range(options.workers)]))
    clock = CudaClock(torch.device("cuda"))
    for batch in BATCHES:
        sweep(batch, clock, options.rows)


if __name__ == "__main__":
    main()
