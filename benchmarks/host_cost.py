"""What a call costs on the host: medians of wall time until it returns, in microseconds, with the GPU never full.

python benchmarks/host_cost.py [--calls 1000]
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

import octavo
from octavo import AttentionSpec, BatchAttention
from octavo.bench.workloads import Workload, make_inputs

SPEC = AttentionSpec(num_qo_heads=32, num_kv_heads=4, head_dim=128)
BATCHES = {
    "1 x 16/16": ((16,), (16,)),
    "1 x 128/128": ((128,), (128,)),
    "16 x 1/4k": ((1,) * 16, (4096,) * 16),
    "1 x 1k": ((1024,), (1024,)),
    "mixed": ((1024,) + (1,) * 15, (1024,) + (2048,) * 15),
}
CALLS_IN_FLIGHT = 20


def median_us(call: Callable[[], object], calls: int) -> float:
    times = []
    for n in range(calls + 50):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
        if n % CALLS_IN_FLIGHT == 0:
            torch.cuda.synchronize()
    return round(statistics.median(times[50:]) * 1e6, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=1000)
    calls = parser.parse_args().calls
    for name, (qo_lens, kv_lens) in BATCHES.items():
        x = make_inputs(Workload(name, qo_lens, kv_lens), SPEC, "cuda")
        attn = BatchAttention(SPEC, max_tokens=x.q.shape[0], max_sequences=len(qo_lens))
        attn.plan(x.batch)
        out, lse = torch.empty_like(x.q), torch.empty(x.q.shape[:2], device="cuda")
        arguments = (x.q, x.kv.k_cache, x.kv.v_cache, x.batch.qo_indptr, x.batch.kv_indptr, x.batch.page_table)
        cost = {
            "octavo.run": median_us(lambda a=arguments: octavo.run(*a), calls),
            "plan": median_us(lambda a=attn, b=x.batch: a.plan(b), calls),
            "BatchAttention.run": median_us(lambda a=attn, x=x: a.run(x.q, x.kv), calls),
            "BatchAttention.run(out, lse)": median_us(
                lambda a=attn, x=x, o=out, m=lse: a.run(x.q, x.kv, out=o, lse=m), calls
            ),
        }
        print(json.dumps({"case": name, "card": torch.cuda.get_device_name(), "host_us": cost}), flush=True)


if __name__ == "__main__":
    main()
