"""The Triton kernels without a GPU: the tests marked `interpreter`, in a process in which Triton interprets them."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FILES = ("test_contract.py", "test_append_merge.py", "test_cases.py", "test_fuzz.py", "test_planner.py")
FEWEST = 250
"""Tests that must have passed; fewer means that the selection has broken."""


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="runs in the process that this test starts")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.timeout(900)
def test_triton_kernels_under_the_interpreter():
    here = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-m", "interpreter", "-p", "no:cacheprovider", "-rfE", "--tb=short"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, *(str(here / name) for name in FILES)],
        cwd=here.parent,
        env=environment,
        capture_output=True,
        text=True,
    )
    report = done.stdout + done.stderr
    assert done.returncode == 0, report
    passed = re.search(r"(\d+) passed", report)
    assert passed is not None and int(passed[1]) >= FEWEST, report
