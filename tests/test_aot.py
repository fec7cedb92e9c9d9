"""Kernels compile ahead of time for every architecture, without a GPU, to the machine code that is meant.

Here a part of the catalog, one of each kind; `octavo compile` builds all of it.
"""

import importlib.util
import os
import re

import pytest

from octavo.aot import compile_build
from octavo.backends.catalog import HOPPER_FORMS, builds, hopper_build

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


@pytest.mark.parametrize("form", HOPPER_FORMS)
def test_hopper_tiles_lie_where_the_ptx_expects_them(form):
    """The kernel's primitives count bytes from where shared memory begins; the compiler decides what lies there.

    Triton's own barrier is initialised after the tiles: its address shows that these begin at 0.
    """
    ptx = hopper_build(*form).compile(90).asm["ptx"]
    (register,) = re.findall(r"mbarrier\.init\.shared::cta\.b64 \[(%r\d+)\], 1;", ptx)
    (base, place) = re.findall(rf"add\.s32\s+{register}, (%r\d+), (\d+);", ptx)[-1]
    assert re.search(rf"mov\.b32\s+{base}, global_smem;", ptx)
    barriers = {int(n) for n in re.findall(r"mbarrier\.init\.shared::cta\.b64 \[global_smem\+(\d+)\]", ptx)}
    assert int(place) % 1024 == 0 and int(place) + 64 == min(barriers)
    tiles = {int(n) for n in re.findall(r"cp\.async\.cg\.shared\.global \[even\+(\d+)\]", ptx)}
    assert min(tiles) == 0 and max(tiles) < int(place)
