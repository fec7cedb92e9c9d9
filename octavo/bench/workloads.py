"""Serving batches as data: lengths from JSON lines, tensors made from them, and the work that they stand for."""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

import torch

from octavo.kv_cache import PagedKV
from octavo.problem import AttentionSpec, PagedBatch
from octavo.shapes import Tensor


@dataclass(frozen=True)
class Workload:
    """One batch: how many query tokens and keys each sequence has."""

    name: str
    qo_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    source: str = ""

    def __post_init__(self) -> None:
        if len(self.qo_lens) != len(self.kv_lens):
            raise ValueError(
                f"{self.name}: expected as many kv_lens as qo_lens ({len(self.qo_lens)}), got {len(self.kv_lens)}; "
                "fix: both hold one length per sequence"
            )
        if any(type(n) is not int or n < 0 for n in (*self.qo_lens, *self.kv_lens)):
            raise ValueError(f"{self.name}: expected lengths >= 0; fix: qo_lens and kv_lens are lists of counts")

    @property
    def num_tokens(self) -> int:
        return sum(self.qo_lens)

    def visible_pairs(self, causal: bool = True, window_left: int = -1) -> int:
        """(query token, key) pairs that attention computes.

        window_left: how many keys before its own a row sees where causal, -1 all.
        """
        pairs = zip(self.qo_lens, self.kv_lens, strict=True)
        if not causal:
            return sum(n * m for n, m in pairs)
        return sum(_visible(n, m) - (_beyond(n, m, window_left) if window_left >= 0 else 0) for n, m in pairs)

    def flops(self, spec: AttentionSpec) -> int:
        """2 (head_dim + value_dim) per visible pair and query head."""
        return 2 * (spec.head_dim + spec.v_dim) * spec.num_qo_heads * self.visible_pairs(spec.causal, _window(spec))

    def bytes(self, spec: AttentionSpec) -> int:
        """Least memory traffic: K/V, page ids and q of rows that see keys read once; out and lse written once."""
        pairs = list(zip(self.qo_lens, self.kv_lens, strict=True))
        window = _window(spec)
        seen = sum(min(m, n + window) if window >= 0 else m for n, m in pairs if n)
        seeing = sum(min(n, m) if spec.causal else n * bool(m) for n, m in pairs)
        kv_dtype = getattr(spec, "kv_dtype", None) or spec.dtype
        kv = seen * spec.num_kv_heads * (spec.head_dim + spec.v_dim) * kv_dtype.itemsize
        queries = seeing * spec.num_qo_heads * spec.head_dim * spec.dtype.itemsize
        outputs = self.num_tokens * spec.num_qo_heads * (spec.v_dim * spec.dtype.itemsize + 4)
        return kv + queries + outputs + 4 * -(-seen // spec.page_size)

    def shrunk(self, max_pairs: int, max_lengths: int | None = None) -> "Workload":
        """The same shape with all lengths divided by one factor: about `max_pairs` visible pairs remain at most, and
        about `max_lengths` query tokens plus keys at most. No length above zero becomes zero.
        """
        factor = (self.visible_pairs() / max_pairs) ** 0.5
        if max_lengths is not None:
            factor = max(factor, (self.num_tokens + sum(self.kv_lens)) / max_lengths)
        if factor <= 1:
            return self
        qo, kv = (tuple(math.ceil(n / factor) for n in lengths) for lengths in (self.qo_lens, self.kv_lens))
        return replace(self, qo_lens=qo, kv_lens=kv)


def _visible(q_len: int, kv_len: int) -> int:
    if kv_len >= q_len:
        return q_len * (kv_len - q_len) + q_len * (q_len + 1) // 2
    return kv_len * (kv_len + 1) // 2


def _beyond(q_len: int, kv_len: int, window_left: int) -> int:
    """Visible pairs, were there no window, in which the key lies more than `window_left` before the row's own."""
    last = kv_len - window_left - 1
    return _visible(min(q_len, last), last) if last > 0 else 0


def _window(spec: AttentionSpec) -> int:
    """window_left of a causal spec, -1 where it sees all."""
    return getattr(spec, "window_left", -1) if spec.causal else -1


def parse_jsonl(lines: Iterable[str], origin: str) -> Iterator[Workload]:
    """Workloads from JSON lines with qo_lens and kv_lens (and optionally id or name, source)."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                row = json.loads(line)
                name = str(row.get("name") or row.get("id") or f"{origin}:{number}")
                yield Workload(name, tuple(row["qo_lens"]), tuple(row["kv_lens"]), str(row.get("source", origin)))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(
                    f"{origin}:{number}: expected a JSON object with qo_lens and kv_lens, got {line.strip()[:60]!r} "
                    f"({type(error).__name__}: {error}); fix: one batch a line, both lists of integers"
                ) from error


def read_jsonl(path: str | Path) -> list[Workload]:
    path = Path(path)
    with path.open() as file:
        return list(parse_jsonl(file, path.stem))


def sample() -> list[Workload]:
    """The real batches shipped with the package; data/SOURCES.md attributes them."""
    text = resources.files("octavo").joinpath("data/sample.jsonl").read_text()
    return list(parse_jsonl(text.splitlines(), "sample"))


@dataclass(frozen=True, eq=False)
class Inputs:
    """Tensors of one workload."""

    spec: AttentionSpec
    q: Tensor
    kv: PagedKV
    batch: PagedBatch


def make_inputs(
    workload: Workload, spec: AttentionSpec, device: torch.device | str, *, seed: int = 0, scattered: bool = True
) -> Inputs:
    """Random inputs. Page ids are a random permutation with holes (scattered) or run consecutively."""
    device = torch.device(device)
    generator = torch.Generator(device=device).manual_seed(seed)
    pages = [-(-n // spec.page_size) for n in workload.kv_lens]
    used = sum(pages)
    total = used + max(8, used // 16)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=spec.dtype, generator=generator)

    ids = (
        torch.randperm(total, device=device, generator=generator)[:used]
        if scattered
        else torch.arange(used, device=device)
    )
    last = [n - (p - 1) * spec.page_size if p else 0 for n, p in zip(workload.kv_lens, pages, strict=True)]
    batch = PagedBatch.csr(
        _indptr(workload.qo_lens, device),
        _indptr(pages, device),
        ids.to(torch.int32),
        torch.tensor(last, dtype=torch.int32, device=device),
    )
    k = randn(total, spec.page_size, spec.num_kv_heads, spec.head_dim)
    v = randn(total, spec.page_size, spec.num_kv_heads, spec.v_dim)
    return Inputs(spec, randn(workload.num_tokens, spec.num_qo_heads, spec.head_dim), PagedKV(k, v), batch)


def _indptr(lengths: Iterable[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(device=device, dtype=torch.int32)
