"""FlashInfer-Trace folders as FlashInfer-Bench has them: definitions/<op>/<name>.json, workloads/<op>/<name>.jsonl.

Index tensors come from the workload's safetensors files; q, k and v too where it has them, else they are random. An
index tensor that the workload leaves random is drawn so that it is valid: the totals among the axes are kept.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from octavo.bench.workloads import Inputs, Workload
from octavo.errors import fail, input_error
from octavo.kv_cache import PagedKV
from octavo.problem import AttentionSpec, PagedBatch
from octavo.reference import sequence_lengths
from octavo.shapes import Tensor
from octavo.validation import check_values

OP_TYPES = ("gqa_paged", "gqa_ragged")
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, eq=False)
class TraceBatch:
    """One workload of a trace: its lengths, its spec, and where its tensors come from."""

    workload: Workload
    spec: AttentionSpec
    batch: PagedBatch
    num_rows: int
    """Rows of q; those past qo_indptr[-1] belong to no sequence."""
    num_pages: int
    sm_scale: float | None
    stored: Mapping[str, tuple[Path, str]] = field(default_factory=dict)
    """Of q, k and v, those with a file: (safetensors file, key in it)."""

    def make_inputs(self, device: torch.device | str, seed: int = 0) -> Inputs:
        """The tensors of this batch. Random K/V fill the used pages alone: captured caches are mostly unused."""
        device = torch.device(device)
        generator = torch.Generator(device=device).manual_seed(seed)
        spec = self.spec
        q_shape = (self.num_rows, spec.num_qo_heads, spec.head_dim)
        used = self.batch.page_table.unique().long().to(device)

        def load(name: str, shape: tuple[int, ...]) -> Tensor | None:
            return _load_tensor(*self.stored[name], shape, spec.dtype).to(device) if name in self.stored else None

        def cache(name: str, dim: int) -> Tensor:
            shape = (self.num_pages, spec.page_size, spec.num_kv_heads, dim)
            stored = load(name, shape)
            if stored is not None:
                return stored
            filled = torch.zeros(shape, dtype=spec.dtype, device=device)
            filled[used] = torch.randn((len(used), *shape[1:]), dtype=spec.dtype, device=device, generator=generator)
            return filled

        q = load("q", q_shape)
        if q is None:
            q = torch.randn(q_shape, dtype=spec.dtype, device=device, generator=generator)
        kv = PagedKV(cache("k", spec.head_dim), cache("v", spec.v_dim))
        return Inputs(spec, q, kv, self.batch.to(device))


def is_trace(path: Path) -> bool:
    """Whether `path` is a folder with definitions and workloads."""
    return (path / "definitions").is_dir() and (path / "workloads").is_dir()


def read_trace(root: str | Path) -> tuple[list[TraceBatch], list[str]]:
    """(batches, names of definitions skipped because they are not grouped-query attention).

    Raises ValueError with what was expected, what came and how to fix it.
    """
    root = Path(root)
    if not is_trace(root):
        fail(root, "a folder with definitions/ and workloads/", "something else", "pass the trace's root folder")
    batches: list[TraceBatch] = []
    skipped = []
    for path in sorted((root / "definitions").glob("*/*.json")):
        definition = _parse(path.read_text(), path)
        if definition.get("op_type") not in OP_TYPES:
            skipped.append(path.stem)
            continue
        lines = root / "workloads" / path.parent.name / f"{path.stem}.jsonl"
        if lines.is_file():
            try:
                batches += _read_workloads(root, definition, path, lines)
            except (AttributeError, KeyError) as error:
                got = f"{type(error).__name__}: {error}"
                raise input_error(
                    lines, "objects as in the FlashInfer-Trace schema", got, "compare axes and inputs"
                ) from error
    if not batches:
        wanted = " or ".join(OP_TYPES)
        got = f"none (skipped {len(skipped)} other definitions)"
        fail(root, f"workloads of a definition with op_type {wanted}", got, "see workloads/<op>/<name>.jsonl")
    return batches, skipped


def _parse(text: str, where: object) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise input_error(where, "JSON", error, "each file holds one object, each line of a .jsonl too") from error
    if not isinstance(value, dict):
        fail(where, "a JSON object", type(value).__name__, "see the FlashInfer-Trace schema")
    return value


def _read_workloads(root: Path, definition: Mapping[str, Any], path: Path, lines: Path) -> Iterator[TraceBatch]:
    spec = _spec_of(definition, path)
    for number, line in enumerate(lines.read_text().splitlines(), 1):
        if line.strip():
            row = _parse(line, f"{lines}:{number}")
            yield _Reader(root, definition, spec, f"{lines}:{number}", row.get("workload", row), path.stem).read()


def _spec_of(definition: Mapping[str, Any], where: Path) -> AttentionSpec:
    axes = definition.get("axes", {})
    const = {name: axis["value"] for name, axis in axes.items() if axis.get("type") == "const"}
    inputs = definition.get("inputs", {})
    dtype = inputs.get("q", {}).get("dtype")
    missing = [name for name in ("num_qo_heads", "num_kv_heads", "head_dim") if name not in const]
    if missing or dtype not in _DTYPES:
        got = f"without {', '.join(missing)}" if missing else f"dtype {dtype}"
        raise input_error(
            where, "constant num_qo_heads, num_kv_heads, head_dim and a 16 or 32 bit float q", got, "correct it"
        )
    name = str(definition.get("name", where.stem))
    return AttentionSpec(
        const["num_qo_heads"],
        const["num_kv_heads"],
        const["head_dim"],
        page_size=const.get("page_size", 1),
        causal="qo_indptr" not in inputs or "causal" in name,
        dtype=_DTYPES[dtype],
    )


@dataclass(frozen=True)
class _Reader:
    """One line of a workloads file."""

    root: Path
    definition: Mapping[str, Any]
    spec: AttentionSpec
    where: str
    row: Mapping[str, Any]
    name: str

    def read(self) -> TraceBatch:
        """The batch that the line describes."""
        ragged = self.definition["op_type"] == "gqa_ragged"
        qo_indptr = self._qo_indptr()
        sequences = qo_indptr.shape[0] - 1
        pages = self._axis("total_kv" if ragged else "num_kv_indices")
        kv_indptr = self._index("kv_indptr")
        if kv_indptr is None:
            kv_indptr = self._random_indptr(sequences, pages)
        num_pages = pages if ragged else self._axis("num_pages")
        ids = torch.arange(num_pages) if ragged else self._index("kv_indices")
        if ids is None:
            ids = torch.randperm(max(num_pages, pages), generator=self._generator())[:pages] % max(num_pages, 1)
        last = self._index("kv_last_page_len")
        if last is None and self.spec.page_size > 1:
            last = torch.full((sequences,), self.spec.page_size, dtype=torch.int32)
        batch = PagedBatch.csr(qo_indptr, kv_indptr, ids.to(torch.int32), None if last is None else last[:sequences])
        uuid = str(self.row.get("uuid", self.where.rsplit(":", 1)[1]))
        num_rows = self._axis("total_q" if "qo_indptr" in self.definition["inputs"] else "batch_size")
        try:
            check_values(self.spec, batch, num_rows, num_pages)
        except ValueError as error:
            raise ValueError(f"{self.where}: {error}") from error
        q_lens, kv_lens = sequence_lengths(batch, self.spec.page_size)
        workload = Workload(f"{self.name}/{uuid[:8]}", tuple(q_lens), tuple(kv_lens), self.name)
        stored = {
            name: self._file(key) for name, key in self._cache_keys(ragged).items() if self._type(key) == "safetensors"
        }
        return TraceBatch(workload, self.spec, batch, num_rows, num_pages, self._scale(), stored)

    def _cache_keys(self, ragged: bool) -> dict[str, str]:
        return {"q": "q", "k": "k" if ragged else "k_cache", "v": "v" if ragged else "v_cache"}

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(0)

    def _qo_indptr(self) -> Tensor:
        """Decode definitions have none: one query token per sequence."""
        if "qo_indptr" not in self.definition.get("inputs", {}):
            return torch.arange(self._axis("batch_size") + 1, dtype=torch.int32)
        stored = self._index("qo_indptr")
        return self._random_indptr(self._axis("len_indptr") - 1, self._axis("total_q")) if stored is None else stored

    def _random_indptr(self, parts: int, total: int) -> Tensor:
        cuts = torch.randint(total + 1, (max(parts - 1, 0),), generator=self._generator()).sort().values
        return torch.cat([torch.tensor([0]), cuts, torch.tensor([total])]).to(torch.int32)

    def _axis(self, name: str) -> int:
        value = self.row.get("axes", {}).get(name)
        if not isinstance(value, int) or value < 0:
            fail(f"{self.where}: axes.{name}", "a count", value, "the workload must fix every variable axis")
        return value

    def _input(self, name: str) -> Mapping[str, Any]:
        value = self.row.get("inputs", {}).get(name, {"type": "random"})
        return value if isinstance(value, dict) else {"type": value}

    def _type(self, name: str) -> str:
        kind = self._input(name).get("type")
        if kind not in ("random", "scalar", "safetensors"):
            fail(f"{self.where}: inputs.{name}.type", "random, scalar or safetensors", repr(kind), "correct it")
        return str(kind)

    def _file(self, name: str) -> tuple[Path, str]:
        entry = self._input(name)
        path = self.root / str(entry.get("path", ""))
        if not path.is_file():
            fix = "download the trace's blob folder beside definitions/"
            fail(f"{self.where}: inputs.{name}.path", "a safetensors file", f"no file {path}", fix)
        return path, str(entry.get("tensor_key", name))

    def _index(self, name: str) -> Tensor | None:
        """An index tensor from its file, or None where it is random."""
        return _load_tensor(*self._file(name)) if self._type(name) == "safetensors" else None

    def _scale(self) -> float | None:
        entry = self._input("sm_scale")
        if entry.get("type") != "scalar":
            return None
        if not isinstance(entry.get("value"), (int, float)):
            fail(f"{self.where}: inputs.sm_scale.value", "a number", entry.get("value"), "correct it")
        return float(entry["value"])


def _load_tensor(
    path: Path, key: str, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            tensor = file.get_tensor(key)
    except SafetensorError as error:
        fix = "download the file itself where a Git LFS pointer lies"
        raise input_error(path, f"a safetensors file with {key!r}", error, fix) from error
    if shape is not None and tensor.numel() == torch.Size(shape).numel():
        tensor = tensor.reshape(shape)
    if shape is not None and (tuple(tensor.shape) != shape or tensor.dtype != dtype):
        got = f"{list(tensor.shape)} {tensor.dtype}"
        fail(f"{path}: {key}", f"shape {list(shape)} {dtype}", got, "the file does not belong to the definition")
    return tensor
