"""The Triton kernels without a GPU: the tests marked `interpreter`, in a process in which Triton interprets them."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

GROUPS = {
    ("test_contract.py",): (3, 60),
    ("test_append_merge.py", "test_planner.py", "test_split.py"): (3, 40),
    ("test_cases.py", "test_fuzz.py"): (99, 20),
    ("test_variants_gpu.py",): (4, 14),
}
"""By files, which share a process: parameters of one test to run at most, and tests that must have passed."""


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="runs in the processes that this test starts")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("files", GROUPS, ids=" ".join)
def test_triton_kernels_under_the_interpreter(files):
    here, (sample, fewest) = Path(__file__).parent, GROUPS[files]
    command = [sys.executable, "-m", "pytest", "-m", "interpreter", "-p", "no:cacheprovider", "-rfE", "--tb=short"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "-W", "ignore::DeprecationWarning", "--sample", str(sample), *(str(here / name) for name in files)],
        cwd=here.parent,
        env=environment,
        capture_output=True,
        text=True,
    )
    report = done.stdout + done.stderr
    assert done.returncode == 0, report
    passed = re.search(r"(\d+) passed", report)
    assert passed is not None and int(passed[1]) >= fewest, report
