"""What is the CPU backend's own: how much memory it takes."""

import subprocess
import sys

import pytest

PEAK = """
import re, torch
from octavo import AttentionSpec, BatchAttention
from octavo.bench.workloads import Workload, make_inputs

spec = AttentionSpec(16, 4, 128, page_size=16, dtype=torch.float32)

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

def prepare(kv_lens):
    x = make_inputs(Workload("memory", (256,) * len(kv_lens), kv_lens), spec, "cpu")
    attention = BatchAttention(spec, device="cpu", backend="cpu")
    attention.plan(x.batch)
    out, lse = torch.zeros_like(x.q), torch.zeros(x.q.shape[:2])
    return lambda: attention.run(x.q, x.kv, out=out, lse=lse)

prepare((300,))()  # what PyTorch allocates once is not the call's
run = prepare((16000, 9000, 16000))
open("/proc/self/clear_refs", "w").write("5")  # the peak is from here on
before = peak()
run()
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads a process's peak from /proc")
def test_memory_beyond_inputs_and_outputs_is_below_three_sequences():
    """Pages are gathered into buffers that all sequences share, and there is no queries x keys mask."""
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    largest = 16000 * 4 * (128 + 128) * 4
    grown = int(done.stdout)
    assert 0 < grown < 3 * largest, f"{grown / largest:.2f} of the largest sequence's K/V"
