"""Sequences that share a prefix: octavo.cascade beside the flat call over the same keys.

    python benchmarks/shared_prefix.py [--sequences 64] [--prefix 16384] [--own 128] [--page-size 1]

Needs one CUDA device; takes seconds. Times are the device's, in us, medians, caches cold: `run` is one layer under a
plan, `call` plans too. Both results are compared with each other, and a sample of rows with the float64 oracle, first.
"""

import argparse
import statistics
from collections.abc import Callable

import torch

from octavo import AttentionSpec, BatchAttention, CascadeAttention, PagedBatch, PagedKV, attend, cascade
from octavo.bench.measure import CudaClock
from octavo.reference import reference

LEAD_US, REPEATS = 400, 31


def batches(sequences: int, prefix: int, own: int, page_size: int) -> tuple[PagedBatch, list[PagedBatch], int]:
    """(flat batch, [prefix, own keys], pages); pages of the prefix first."""
    shared, each = prefix // page_size, -(-own // page_size)
    ids = torch.randperm(shared + sequences * each, dtype=torch.int64).to(torch.int32)
    mine = ids[shared:].view(sequences, each)
    whole = torch.cat([ids[:shared].expand(sequences, shared), mine], 1).reshape(-1)
    rows = torch.arange(sequences + 1, dtype=torch.int32)
    last = torch.full((sequences,), own - (each - 1) * page_size, dtype=torch.int32)
    full = torch.tensor([page_size], dtype=torch.int32)
    flat = PagedBatch.csr(rows, rows * (shared + each), whole, last)
    ends = torch.tensor([0, sequences], dtype=torch.int32)
    level = PagedBatch.csr(ends, torch.tensor([0, shared], dtype=torch.int32), ids[:shared], full)
    own_keys = PagedBatch.csr(rows, rows * each, mine.reshape(-1), last)
    return flat.to("cuda"), [level.to("cuda"), own_keys.to("cuda")], len(ids)


def check(spec: AttentionSpec, q: torch.Tensor, kv: PagedKV, flat: PagedBatch, made: torch.Tensor) -> None:
    rows = [0, q.shape[0] // 2, q.shape[0] - 1]
    exact, _ = reference(spec, q, kv.k_cache, kv.v_cache, flat, rows=rows)
    error = float((made[rows].cpu().double() - exact).abs().max())
    limit = 4 * torch.finfo(q.dtype).eps * float(exact.abs().max())
    assert error <= limit, f"cascade is off by {error:.3g}, allowed {limit:.3g}"


def median(clock: CudaClock, call: Callable[[], object]) -> float:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    return statistics.median(clock.span(call, LEAD_US) for _ in range(REPEATS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("sequences", 64), ("prefix", 16384), ("own", 128), ("page-size", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    a = parser.parse_args()
    spec = AttentionSpec(32, 4, 128, page_size=a.page_size)
    flat, levels, pages = batches(a.sequences, a.prefix, a.own, a.page_size)
    shape = (pages, a.page_size, spec.num_kv_heads, spec.head_dim)
    kv = PagedKV(*(torch.randn(shape, device="cuda", dtype=spec.dtype) for _ in "kv"))
    q = torch.randn(a.sequences, spec.num_qo_heads, spec.head_dim, device="cuda", dtype=spec.dtype)

    one, many = BatchAttention(spec), CascadeAttention(spec, 2)
    one.plan(flat, num_tokens=a.sequences)
    many.plan(levels, num_tokens=a.sequences)
    check(spec, q, kv, flat, many.run(q, kv)[0])
    check(spec, q, kv, flat, one.run(q, kv)[0])
    clock = CudaClock(torch.device("cuda"))
    calls = {
        "run": (lambda: one.run(q, kv), lambda: many.run(q, kv)),
        "call": (lambda: attend(q, kv, flat), lambda: cascade(q, kv, levels)),
    }
    print(f"{torch.cuda.get_device_name()}; {a.sequences} x 1 query, {a.prefix} shared + {a.own} keys")
    for name, (flat_call, cascade_call) in calls.items():
        times = median(clock, flat_call), median(clock, cascade_call)
        print(f"{name:5} flat {times[0]:8.1f}  cascade {times[1]:8.1f}  ratio {times[0] / times[1]:.2f}")


if __name__ == "__main__":
    main()
