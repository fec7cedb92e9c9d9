"""The CPU backend against PyTorch alone, in one run: `python benchmarks/cpu_baseline.py BATCHES.jsonl`.

The baseline is what one writes without Octavo: per sequence, K/V gathered by page id, then
`scaled_dot_product_attention` with an explicit boolean mask and enable_gqa=True. Both are timed in turn, batch
by batch; the best of some rounds counts.
"""

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import octavo
from octavo.bench.summary import geometric_mean
from octavo.bench.workloads import Inputs, Workload, make_inputs, read_jsonl

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def baseline(x: Inputs, workload: Workload) -> Tensor:
    """out [tokens, qo_heads, head_dim] of one batch; page_size 1."""
    out = torch.empty_like(x.q)
    row = page = 0
    for q_len, kv_len in zip(workload.qo_lens, workload.kv_lens, strict=True):
        ids = x.batch.page_table[page : page + kv_len]
        k, v = (cache[:, 0].index_select(0, ids).transpose(0, 1)[None] for cache in (x.kv.k_cache, x.kv.v_cache))
        q = x.q[row : row + q_len].transpose(0, 1)[None]
        mask = torch.ones(q_len, kv_len, dtype=torch.bool).tril(kv_len - q_len)
        part = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        out[row : row + q_len] = part[0].transpose(0, 1)
        row, page = row + q_len, page + kv_len
    return out


def interleaved(functions: tuple[Callable[[], object], ...], rounds: int) -> list[float]:
    """Best time of each in milliseconds, the functions taking turns."""
    best = [math.inf] * len(functions)
    for _ in range(rounds):
        for i, function in enumerate(functions):
            start = time.perf_counter()
            function()
            best[i] = min(best[i], (time.perf_counter() - start) * 1e3)
    return best


def compare(workloads: list[Workload], dtype: torch.dtype, rounds: int) -> float:
    """Print a line per batch; return the geometric mean of baseline time / Octavo time."""
    spec = octavo.AttentionSpec(num_qo_heads=32, num_kv_heads=4, head_dim=128, page_size=1, dtype=dtype)
    ratios = []
    for workload in workloads:
        x = make_inputs(workload, spec, "cpu", seed=0)
        ours, theirs = (lambda x=x: octavo.attend(x.q, x.kv, x.batch)[0], lambda x=x, w=workload: baseline(x, w))
        error = float((ours().float() - theirs().float()).abs().max())
        fast, slow = interleaved((ours, theirs), rounds)
        ratios.append(slow / fast)
        print(
            f"{workload.name:24} {len(workload.qo_lens):4} sequences {workload.num_tokens:6} queries "
            f"{sum(workload.kv_lens):7} keys  {fast:8.2f} ms  baseline {slow:8.2f} ms  {ratios[-1]:5.2f}x  "
            f"differ by {error:.1e}"
        )
    return geometric_mean(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="JSON lines with qo_lens and kv_lens")
    parser.add_argument("--max-queries", type=int, default=1200, help="leave larger batches out")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bf16", "fp32"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    workloads = [w for w in read_jsonl(options.file) if w.num_tokens <= options.max_queries]
    if not workloads:
        parser.error(f"{options.file}: expected a batch of at most {options.max_queries} queries; raise --max-queries")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}")
    means = {name: compare(workloads, DTYPES[name], options.rounds) for name in options.dtypes}
    for name, mean in means.items():
        print(f"{name}: {mean:.2f}x, geometric mean over {len(workloads)} batches")


if __name__ == "__main__":
    main()
