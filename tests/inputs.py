"""Attention problems as data, and tensors made from them in which everything an operator must not read is poison."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo import AttentionSpec, PagedBatch, PagedKV
from octavo.reference import page_ids, reference, sequence_lengths

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
I32, I64 = torch.int32, torch.int64
BAD_PAGE = 1_000_000_007
"""A page id far outside every cache; stands wherever a page table must not be read."""


@dataclass(frozen=True)
class Case:
    """One attention problem, without tensors."""

    name: str
    qo_lens: tuple[int, ...] = (3, 0, 1, 18)
    kv_lens: tuple[int, ...] = (20, 7, 33, 18)
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (64, 64)
    page_size: int = 1
    causal: bool = True
    dtype: torch.dtype = BF16
    dense: bool = False
    index_dtypes: tuple[torch.dtype, ...] = (I32, I32, I32, I32)
    padding: int = 2
    scattered: bool = True
    kv_storage: str = "nhd"
    q_storage: str = "contiguous"
    sm_scale: float | None = None
    gain: float = 1.0
    seed: int = 0

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(*self.heads, *self.dims, self.page_size, self.causal, self.dtype)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False)
class Problem:
    """The tensors of one call."""

    spec: AttentionSpec
    q: Tensor
    kv: PagedKV
    batch: PagedBatch
    sm_scale: float | Tensor | None = None

    def expected(self, rows: list[int] | None = None) -> tuple[Tensor, Tensor]:
        return reference(self.spec, self.q, self.kv.k_cache, self.kv.v_cache, self.batch, self.sm_scale, rows)

    def with_(self, **changes: object) -> "Problem":
        return replace(self, **changes)


def indptr(lengths: Iterable[int], dtype: torch.dtype = I32) -> Tensor:
    return torch.tensor([0, *lengths], dtype=I64).cumsum(0).to(dtype)


def pages_of(kv_lens: Iterable[int], page_size: int) -> list[int]:
    return [-(-n // page_size) for n in kv_lens]


def build(case: Case, device: str = "cpu") -> Problem:
    """Random tensors; unused pages, tails of last pages, padding rows and gaps between strides are NaN."""
    generator = torch.Generator().manual_seed(case.seed)
    counts = pages_of(case.kv_lens, case.page_size)
    total = sum(counts) + 5
    order = torch.randperm(total, generator=generator) if case.scattered else torch.arange(2, total)
    ids = order[: sum(counts)]
    shape = (total, case.page_size, case.heads[1])
    k, v = (torch.full((*shape, d), math.nan, dtype=case.dtype) for d in case.dims)
    position = 0
    for length, count in zip(case.kv_lens, counts, strict=True):
        for i, page in enumerate(ids[position : position + count].tolist()):
            used = min(case.page_size, length - i * case.page_size)
            for cache in (k, v):
                cache[page, :used] = torch.randn(cache[page, :used].shape, generator=generator) * case.gain
        position += count
    q = torch.randn(sum(case.qo_lens), case.heads[0], case.dims[0], generator=generator) * case.gain
    q = torch.cat([q, torch.full((case.padding, *q.shape[1:]), math.nan)]).to(case.dtype)
    batch = _table(case, ids, counts)
    kv = KV_STORAGE[case.kv_storage](k.to(device), v.to(device))
    return Problem(case.spec, Q_STORAGE[case.q_storage](q.to(device)), kv, batch.to(device), case.sm_scale)


def storage_of(x: Tensor) -> Tensor:
    """All elements of the memory that x is a view of."""
    return x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)


def without_poison(p: Problem) -> Problem:
    """The same problem, in place, with finite numbers where the poison was."""
    for x in (p.q, p.kv.k_cache, p.kv.v_cache):
        storage_of(x).nan_to_num_(0.5)
    return p


def copied(k: Tensor, v: Tensor) -> Iterator[Tensor]:
    """The same views of a copy of the whole memory, which k and v may share."""
    memory = storage_of(k).clone()
    shared = k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    others = memory if shared else storage_of(v).clone()
    return (m.as_strided(x.shape, x.stride(), x.storage_offset()) for m, x in ((memory, k), (others, v)))


def new_tokens(problem: Problem, seed: int = 5) -> list[Tensor]:
    """Keys and values for each row of q; those of padding rows are NaN."""
    generator = torch.Generator().manual_seed(seed)
    spec, rows = problem.spec, problem.q.shape[0]
    used = int(problem.batch.qo_indptr[-1])
    made = []
    for dim in (spec.head_dim, spec.v_dim):
        x = torch.randn(rows, spec.num_kv_heads, dim, generator=generator)
        x[used:] = math.nan
        made.append(x.to(problem.q))
    return made


def append_in_loops(problem: Problem, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Caches as append must leave them: views of a copy of the caches' whole memory."""
    k_cache, v_cache = copied(problem.kv.k_cache, problem.kv.v_cache)
    write_in_loops(problem.batch.to("cpu"), k, v, k_cache, v_cache)
    return k_cache, v_cache


def write_in_loops(batch: PagedBatch, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    page_size, row = k_cache.shape[1], 0
    for sequence, (q_len, kv_len) in enumerate(zip(*sequence_lengths(batch, page_size), strict=True)):
        ids = page_ids(batch, sequence, -(-kv_len // page_size)).tolist()
        for position in range(kv_len - q_len, kv_len):
            if position >= 0:
                where = ids[position // page_size], position % page_size
                k_cache[where], v_cache[where] = k[row], v[row]
            row += 1


def _table(case: Case, ids: Tensor, counts: list[int]) -> PagedBatch:
    qo_type, ptr_type, id_type, length_type = case.index_dtypes
    qo_indptr = indptr(case.qo_lens, qo_type)
    if case.dense:
        table = torch.full((len(counts), max(counts, default=0) + 2), BAD_PAGE, dtype=id_type)
        for row, own in zip(table, ids.split(counts), strict=True):
            row[: len(own)] = own
        return PagedBatch.dense(qo_indptr, table, torch.tensor(case.kv_lens, dtype=length_type))
    last = [n - (c - 1) * case.page_size if c else 0 for n, c in zip(case.kv_lens, counts, strict=True)]
    return PagedBatch.csr(
        qo_indptr,
        indptr(counts, ptr_type),
        torch.cat([ids, torch.full((3,), BAD_PAGE)]).to(id_type),
        torch.tensor(last, dtype=length_type),
    )


def _poisoned(x: Tensor, *shape: int) -> Tensor:
    return torch.full(shape, math.nan, dtype=x.dtype, device=x.device)


def _page_gaps(x: Tensor) -> Tensor:
    view = _poisoned(x, 2 * x.shape[0], *x.shape[1:])[1::2]
    return view.copy_(x)


def _token_gaps(x: Tensor) -> Tensor:
    view = _poisoned(x, x.shape[0], 2 * x.shape[1] + 1, *x.shape[2:])[:, 1::2]
    return view.copy_(x)


def _head_gaps(x: Tensor) -> Tensor:
    view = _poisoned(x, *x.shape[:2], 3 * x.shape[2], x.shape[3])[:, :, 1::3]
    return view.copy_(x)


def _unaligned(x: Tensor) -> Tensor:
    """Rows of odd length that begin at odd elements: no 16-byte vector load is aligned."""
    view = _poisoned(x, *x.shape[:-1], x.shape[-1] + 1)[..., 1:]
    return view.copy_(x)


def _hnd(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous()


def _all_layers(k: Tensor, v: Tensor) -> PagedKV:
    """Every layer's K and V of one page side by side, as engines with one pool for all layers have it."""
    pool = _poisoned(k, k.shape[0], 3, 2, *k.shape[1:])
    pool[:, 1, 0], pool[:, 1, 1] = k, v
    return PagedKV(pool[:, 1, 0], pool[:, 1, 1])


def _two_pools(k: Tensor, v: Tensor) -> PagedKV:
    both = torch.stack([k, v])
    return PagedKV(both[0], both[1])


def _shared_heads(k: Tensor, v: Tensor) -> PagedKV:
    """One stored head that all K/V heads show: stride 0."""
    return PagedKV(*(x[:, :, :1].contiguous().expand(x.shape) for x in (k, v)))


KV_STORAGE: dict[str, Callable[[Tensor, Tensor], PagedKV]] = {
    "nhd": PagedKV,
    "hnd": lambda k, v: PagedKV(_hnd(k), _hnd(v), layout="HND"),
    "combined": lambda k, v: PagedKV.combined(torch.stack([k, v], 1)),
    "combined hnd": lambda k, v: PagedKV.combined(torch.stack([_hnd(k), _hnd(v)], 1), layout="HND"),
    "packed": lambda k, v: PagedKV.packed(_hnd(torch.cat([k, v], -1)), k.shape[-1]),
    "packed nhd": lambda k, v: PagedKV.packed(torch.cat([k, v], -1), k.shape[-1], layout="NHD"),
    "two pools": _two_pools,
    "all layers": _all_layers,
    "page gaps": lambda k, v: PagedKV(_page_gaps(k), _page_gaps(v)),
    "token gaps": lambda k, v: PagedKV(_token_gaps(k), _token_gaps(v)),
    "head gaps": lambda k, v: PagedKV(_head_gaps(k), _head_gaps(v)),
    "k and v differ": lambda k, v: PagedKV(_head_gaps(k), PagedKV(k, _hnd(v).transpose(1, 2)).v_cache),
    "unaligned": lambda k, v: PagedKV(_unaligned(k), _unaligned(v)),
    "shared heads": _shared_heads,
}


def _fused_qkv(q: Tensor) -> Tensor:
    view = _poisoned(q, q.shape[0], q.shape[1] + 4, q.shape[2])[:, : q.shape[1]]
    return view.copy_(q)


def _q_head_major(q: Tensor) -> Tensor:
    return q.transpose(0, 1).contiguous().transpose(0, 1)


def _q_token_gaps(q: Tensor) -> Tensor:
    view = _poisoned(q, 2 * q.shape[0], *q.shape[1:])[::2]
    return view.copy_(q)


Q_STORAGE: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda q: q,
    "fused qkv": _fused_qkv,
    "head major": _q_head_major,
    "token gaps": _q_token_gaps,
    "unaligned": _unaligned,
    "shared tokens": lambda q: q[:1].expand(q.shape),
}
