"""Benchmark problems as data: a batch, a spec and the order of its pages. Names say what they hold: "8x1k/4k"."""

import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from octavo.bench.workloads import Workload, sample
from octavo.problem import AttentionSpec

SPEC = AttentionSpec(num_qo_heads=32, num_kv_heads=4, head_dim=128)
"""The problem of most rows: a group of 8, bfloat16, page_size 1."""


@dataclass(frozen=True)
class Problem:
    """One benchmark case, unique in a run by name and page order. `seed` draws the tensors and the order of pages."""

    name: str
    workload: Workload
    spec: AttentionSpec = SPEC
    scattered: bool = True
    seed: int = 0

    @property
    def pages(self) -> str:
        return "scattered" if self.scattered else "consecutive"

    @property
    def flops(self) -> int:
        return self.workload.flops(self.spec)

    @property
    def bytes(self) -> int:
        return self.workload.bytes(self.spec)

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "qo_lens": list(self.workload.qo_lens),
            "kv_lens": list(self.workload.kv_lens),
            "source": self.workload.source,
            "spec": spec_as_json(self.spec),
            "scattered": self.scattered,
            "seed": self.seed,
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "Problem":
        workload = Workload(row["name"], tuple(row["qo_lens"]), tuple(row["kv_lens"]), row["source"])
        return cls(row["name"], workload, spec_from_json(row["spec"]), row["scattered"], row["seed"])


def spec_as_json(spec: AttentionSpec) -> dict[str, Any]:
    """Fields by name, those of variants where they are not their default: other revisions may not know them.

    Dtypes as "bfloat16".
    """
    values = [(field, getattr(spec, field.name)) for field in fields(spec)]
    row = {field.name: value for field, value in values if not field.kw_only or value != field.default}
    return {k: str(v).removeprefix("torch.") if isinstance(v, torch.dtype) else v for k, v in row.items()}


def spec_from_json(row: Mapping[str, Any]) -> AttentionSpec:
    """Fields that a row lacks have their defaults."""
    dtypes = {name: getattr(torch, row[name]) for name in ("dtype", "kv_dtype") if row.get(name)}
    return AttentionSpec(**{**row, **dtypes})


_COUNT = r"\d+[km]?"
_LENGTHS = rf"{_COUNT}(?:\.\.{_COUNT})?"
_NAME = re.compile(rf"(?:[a-z ]+ )?(?:(?P<n>\d+)x)?(?P<q>{_LENGTHS})/(?P<k>{_LENGTHS})")


def parse_case(name: str) -> Workload:
    """The batch that a name like "8x1k/4k" stands for: 8 sequences of 1024 queries over 4096 keys.

    "64x1..64/1k..8k" draws each length uniformly, always the same; words before it ("decode 16x1/4k") only label it.

    >>> parse_case("decode 2x1/4k").kv_lens
    (4096, 4096)
    """
    found = _NAME.fullmatch(name)
    if found is None:
        raise ValueError(
            f"case: expected [label] [COUNTx]QUERIES/KEYS with numbers, ranges a..b, units k and m, got {name!r}; "
            'fix: write it like "8x1k/4k" or "decode 64x1/4k"'
        )
    count, rng = int(found["n"] or 1), random.Random(0)
    qo = [rng.randint(*_range(found["q"])) for _ in range(count)]
    kv = [rng.randint(*_range(found["k"])) for _ in range(count)]
    return Workload(name, tuple(qo), tuple(kv), "synthetic")


def _range(text: str) -> tuple[int, int]:
    ends = [int(part.rstrip("km")) * _UNITS.get(part[-1], 1) for part in text.split("..")]
    return ends[0], ends[-1]


_UNITS = {"k": 1 << 10, "m": 1 << 20}


ROWS = (
    "1x16/16",
    "1x128/128",
    "1x1k/1k",
    "1x4k/4k",
    "1x8k/8k",
    "1x16k/16k",
    "1x512/8k",
    "1x2k/32k",
    "8x1k/4k",
    "16x128/8k",
    "64x1..64/1k..8k",
    "decode 1x1/32k",
    "decode 16x1/4k",
    "decode 64x1/4k",
    "decode 256x1/2k",
    "dead 12383/1",
)
"""What every change is measured on. "dead": 12383 queries of which one sees a key."""

QUICK_ROWS = ("1x128/128", "1x1k/1k", "8x1k/4k", "decode 64x1/4k", "dead 12383/1")
CPU_ROWS = ("1x128/128", "1x512/2k", "4x64/1k", "decode 8x1/2k", "dead 512/1")
QUICK_CPU_ROWS = ("1x64/64", "2x32/256", "decode 4x1/512", "dead 256/1")

_GROUPS = ((32, 32), (32, 8), (32, 4), (64, 8), (40, 8), (28, 4), (24, 2), (16, 1))
_DIMS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
_SQUARES = ("128", "256", "512", "1k", "2k", "4k", "8k", "16k", "32k")

_CONTEXTS = ("1k", "4k", "16k", "32k", "128k", "256k", "512k", "1m")

SETS = ("rows", "sample", "batch", "keys", "context", "page", "order", "heads", "dim")


def problem_set(name: str, spec: AttentionSpec, *, device: str = "cuda", quick: bool = False) -> list[Problem]:
    """The problems of one set: "rows", the shipped serving steps ("sample"), or a sweep over what the name says."""
    if name == "rows":
        gpu, cpu = (QUICK_ROWS, QUICK_CPU_ROWS) if quick else (ROWS, CPU_ROWS)
        return named(gpu if device == "cuda" else cpu, spec)
    if name == "sample":
        return from_workloads(sample(), spec, device=device)
    return _SWEEPS[name](spec, _SweepScale.of(device, quick))


@dataclass(frozen=True)
class _SweepScale:
    """What a sweep runs over: smaller on a CPU, fewer points when quick."""

    prefill: str
    decode: str
    top: int
    """Longest square problem of the keys sweep."""
    step: int

    @classmethod
    def of(cls, device: str, quick: bool) -> "_SweepScale":
        step = 2 if quick else 1
        return cls("8x1k/4k", "64x1/4k", 32768, step) if device == "cuda" else cls("2x64/256", "4x1/512", 1024, step)


def named(names: Iterable[str], spec: AttentionSpec) -> list[Problem]:
    return [Problem(name, parse_case(name), spec) for name in names]


def _batch_sweep(spec: AttentionSpec, scale: _SweepScale) -> list[Problem]:
    """From one sequence on, with so few keys each that the largest batch's fit next to copies that peers gather."""
    most, keys = (4096, "1k") if scale.top > 1024 else (8, "512")
    sizes = [1 << i for i in range(most.bit_length())][:: scale.step]
    return named([f"decode {n}x1/{keys}" for n in sizes], spec)


def _keys_sweep(spec: AttentionSpec, scale: _SweepScale) -> list[Problem]:
    lengths = [n for n in _SQUARES if _range(n)[0] <= scale.top][:: scale.step]
    return named([f"1x{n}/{n}" for n in lengths], spec)


def _context_sweep(spec: AttentionSpec, scale: _SweepScale) -> list[Problem]:
    """512 queries, and one, over ever longer prefixes."""
    most = scale.top * 32
    lengths = [n for n in _CONTEXTS if _range(n)[0] <= most][:: scale.step]
    queries = "512" if scale.top > 1024 else "32"
    return named([name for n in lengths for name in (f"1x{queries}/{n}", f"decode 1x1/{n}")], spec)


def _order_sweep(spec: AttentionSpec, scale: _SweepScale) -> list[Problem]:
    """The same batches with page ids at random and consecutive, for small and large pages."""
    cases = (scale.prefill, f"decode {scale.decode}")
    specs = [replace(spec, page_size=n) for n in (1, 16, 64)[:: scale.step]]
    each = [(f"{case} page {s.page_size}", parse_case(case), s) for s in specs for case in cases]
    return [Problem(*one, scattered=scattered) for one in each for scattered in (True, False)]


def _vary(scale: _SweepScale, specs: Mapping[str, AttentionSpec]) -> list[Problem]:
    cases = (scale.prefill, f"decode {scale.decode}")
    chosen = list(specs.items())[:: scale.step]
    return [Problem(f"{case} {label}", parse_case(case), spec) for label, spec in chosen for case in cases]


def _page_sweep(spec: AttentionSpec, scale: _SweepScale) -> list[Problem]:
    return _vary(scale, {f"page {n}": replace(spec, page_size=n) for n in (1, 2, 8, 16, 32, 64, 128)})


def _heads_sweep(spec: AttentionSpec, scale: _SweepScale) -> list[Problem]:
    pairs = {f"heads {q}/{kv}": replace(spec, num_qo_heads=q, num_kv_heads=kv) for q, kv in _GROUPS}
    return _vary(scale, pairs)


def _dim_sweep(spec: AttentionSpec, scale: _SweepScale) -> list[Problem]:
    return _vary(scale, {f"dim {d}/{dv}": replace(spec, head_dim=d, value_dim=dv) for d, dv in _DIMS})


_SWEEPS = {
    "batch": _batch_sweep,
    "keys": _keys_sweep,
    "context": _context_sweep,
    "page": _page_sweep,
    "order": _order_sweep,
    "heads": _heads_sweep,
    "dim": _dim_sweep,
}

CPU_PAIRS = 1 << 20
"""Visible pairs that a workload file's batch keeps on a CPU."""


def from_workloads(workloads: Iterable[Workload], spec: AttentionSpec, *, device: str = "cuda") -> list[Problem]:
    """Problems of a workload file. On a CPU long ones are shrunk, and their names say so."""
    problems = []
    for workload in workloads:
        small = workload if device == "cuda" else workload.shrunk(CPU_PAIRS)
        name = workload.name if small == workload else f"{workload.name} shrunk"
        problems.append(Problem(name, replace(small, name=name), spec))
    return problems


def select(problems: Iterable[Problem], pattern: str | None = None) -> list[Problem]:
    """Those whose name the regular expression finds, each name and page order once."""
    chosen: dict[tuple[str, bool], Problem] = {}
    for problem in problems:
        if pattern is None or re.search(pattern, problem.name):
            chosen.setdefault((problem.name, problem.scattered), problem)
    return list(chosen.values())
