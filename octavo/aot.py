"""Ahead-of-time builds: every kernel compiled for an architecture without a GPU, and what its machine code holds."""

import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

from octavo.backends.catalog import KernelBuild, builds

TENSOR_CORES = ("HMMA", "HGMMA", "IMMA", "IGMMA", "QGMMA", "OMMA", "QMMA", "UTCHMMA", "UTCQMMA", "UTCOMMA")
ASYNC_COPIES = ("LDGSTS", "UTMALDG", "UTMASTG", "UBLKCP")
ARCHS = ("sm_80", "sm_90", "sm_100", "sm_120")
WORKERS = 2

_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)((?:\.\w+)*)", re.MULTILINE)
_WIDTHS = {".64": 8, ".128": 16, ".U8": 1, ".S8": 1, ".U16": 2, ".S16": 2}


@dataclass(frozen=True)
class CompiledReport:
    """What one kernel became on one architecture."""

    name: str
    sm: int
    registers: int
    """Registers per thread."""
    spills: int
    """Bytes that spill instructions store and load per thread, each counted once."""
    shared_bytes: int
    """Shared memory per block."""
    instructions: dict[str, int] = field(default_factory=dict)
    """Tensor-core and asynchronous-copy instructions found, by mnemonic."""
    failures: tuple[str, ...] = ()
    """Expectations that did not hold."""

    @property
    def ok(self) -> bool:
        return not self.failures


def parse_arch(name: str) -> int:
    """90 for "sm_90". Raises ValueError for anything else than sm_ and two or three digits from 80 up."""
    found = re.fullmatch(r"sm_(\d{2,3})", name)
    if found is None or int(found[1]) < 80:
        raise ValueError(
            f"--arch: expected sm_80 or newer, like {', '.join(ARCHS)}, got {name!r}; fix: write it like sm_90"
        )
    return int(found[1])


def compile_build(build: KernelBuild, sm: int) -> CompiledReport:
    """Compile one build for compute capability `sm` and hold it to its expectations. Needs no GPU.

    Raises RuntimeError under TRITON_INTERPRET=1, where kernels can't be compiled. A kernel that does not compile
    makes a report with that failure.
    """
    import triton

    if triton.knobs.runtime.interpret:
        raise RuntimeError("compile: expected compiled kernels, got TRITON_INTERPRET=1; fix: unset it")
    try:
        compiled = build.compile(sm)
    except Exception as error:  # Whatever the compiler raises, it is the finding about this build.
        lines = str(error).strip().splitlines() or [""]
        return CompiledReport(
            build.name, sm, 0, 0, 0, failures=(f"does not compile: {type(error).__name__}: {lines[-1]}",)
        )
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        registers = _registers(_tool("cuobjdump", "-res-usage", cubin))
        counts, spills = read_sass(_tool("nvdisasm", "-c", cubin))
    return CompiledReport(
        build.name,
        sm,
        registers,
        spills,
        int(compiled.metadata.shared),
        {m: n for m, n in sorted(counts.items()) if m in (*TENSOR_CORES, *ASYNC_COPIES)},
        unmet(build, counts, spills),
    )


def unmet(build: KernelBuild, counts: Counter[str], spills: int) -> tuple[str, ...]:
    """What of a build's expectations does not hold. A mnemonic may be part of a longer one: MMA is found in UTCHMMA."""
    failures = [
        f"expected {wanted} instructions, got none" for wanted in build.expect if not any(wanted in m for m in counts)
    ]
    if build.max_spills is not None and spills > build.max_spills:
        failures.append(f"expected at most {build.max_spills} bytes of spills, got {spills}")
    return tuple(failures)


def read_sass(text: str) -> tuple[Counter[str], int]:
    """(instructions by mnemonic, bytes that local-memory instructions move) of a disassembly."""
    counts: Counter[str] = Counter()
    spills = 0
    for mnemonic, modifiers in _INSTRUCTION.findall(text):
        counts[mnemonic] += 1
        if mnemonic in ("LDL", "STL"):
            spills += next((width for suffix, width in _WIDTHS.items() if suffix in modifiers), 4)
    if not counts:
        raise RuntimeError(
            "nvdisasm: expected instructions, got none; fix: Triton's bundled tools do not know this cubin"
        )
    return counts, spills


def _registers(text: str) -> int:
    return max((int(n) for n in re.findall(r"\bREG:(\d+)", text)), default=0)


def _tool(name: str, *arguments: object) -> str:
    """Output of one of the binaries that Triton brings along."""
    from triton import knobs

    path = getattr(knobs.nvidia, name).path
    command = [path, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def compile_all(archs: Sequence[int], pattern: str = "", workers: int = WORKERS) -> Iterator[CompiledReport | int]:
    """Compile every kernel of the catalog whose name holds `pattern`; first yields their number, then reports in order.

    Work is done in fresh processes, so TRITON_INTERPRET=1 in this one does not matter.
    """
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_leave_interpreter) as pool:
        jobs = []
        for sm in archs:
            names = pool.submit(_names, sm).result()
            jobs += [(sm, i) for i, name in enumerate(names) if pattern in name]
        yield len(jobs)
        yield from pool.map(_compile_at, *zip(*jobs, strict=True)) if jobs else ()


def _leave_interpreter() -> None:
    """Before Triton is imported, which reads this when it decorates kernels."""
    os.environ.pop("TRITON_INTERPRET", None)


def _names(sm: int) -> list[str]:
    return [build.name for build in builds(sm)]


def _compile_at(sm: int, index: int) -> CompiledReport:
    return compile_build(builds(sm)[index], sm)
