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

# Of each architecture what differs most; sm_90, which has a kernel of its own, in more forms.
HOPPER = r"hopper.*(d128 ps1 (runs cut|scattered)|d256)"
KINDS = {
    80: r"h32/4 d128/128 ps1 bfloat16 causal (m128|csr)$|^plan csr m128/16$|append",
    90: r"h32/4 d128/128 ps1 bfloat16 causal (m16|m128|csr)$|^plan csr m128/16$|append|merge|" + HOPPER,
    100: r"h32/4 d128/128 ps1 bfloat16 causal (m16|m128)$|^plan csr m128/16$",
    120: r"h32/4 d128/128 ps1 bfloat16 causal (m16|m128)$|^plan csr m128/16$",
}
SWEEP = r"h32/4 d128/128 ps1 |h16/16 d192/128|h8/1 d256/256 .* m64|hopper|plan|append|merge|combine"


def check(sm, pattern, fewest):
    chosen = [build for build in builds(sm) if re.search(pattern, build.name)]
    assert len(chosen) >= fewest
    for build in chosen:
        report = compile_build(build, sm)
        assert report.ok, f"{build.name} for sm_{sm}: {report.failures}"
        assert report.registers > 0


@pytest.mark.parametrize("sm", KINDS)
def test_kernels_compile(sm):
    check(sm, KINDS[sm], 4)


@pytest.mark.sweep
@pytest.mark.timeout(900)
@pytest.mark.parametrize("sm", KINDS)
def test_more_kernels_compile(sm):
    check(sm, SWEEP, 10)


FEW_FORMS = (HOPPER_FORMS[0], HOPPER_FORMS[1], HOPPER_FORMS[-1])


@pytest.mark.parametrize(
    "form", [pytest.param(f, marks=() if f in FEW_FORMS else pytest.mark.sweep) for f in HOPPER_FORMS]
)
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
