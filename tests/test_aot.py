"""Kernels compile ahead of time for every architecture, without a GPU, to the machine code that is meant.

Here a part of the catalog, one of each kind; `octavo compile` builds all of it.
"""

import importlib.util
import os
import re

import pytest

from octavo.aot import compile_build
from octavo.backends.catalog import builds

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"),
]

KINDS = re.compile(r"h32/4 d128/128 ps1 |h16/16 d192/128|h8/1 d256/256 .* m64|hopper|plan|append|merge|combine")


@pytest.mark.parametrize("sm", [80, 90, 100, 120])
def test_kernels_compile(sm):
    chosen = [build for build in builds(sm) if KINDS.search(build.name)]
    assert len(chosen) >= 10
    for build in chosen:
        report = compile_build(build, sm)
        assert report.ok, f"{build.name} for sm_{sm}: {report.failures}"
        assert report.registers > 0
