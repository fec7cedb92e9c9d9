"""Where each sequence's keys are, and reading them out of the pages, on the CPU."""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch

from octavo.errors import fail
from octavo.problem import PagedBatch
from octavo.shapes import Tensor

KEY_MULTIPLE = 16
"""PyTorch's kernel takes keys in vectors of 16 float32; each of the rest costs as much as such a vector."""


@dataclass(frozen=True, eq=False)
class SequencePages:
    """Rows [start, start + q_len) of q, and the pages that hold their kv_len keys."""

    start: int
    q_len: int
    kv_len: int
    num_pages: int
    page_ids: Tensor

    def live_rows(self, causal: bool) -> int:
        """How many rows see a key: the last ones."""
        return min(self.q_len, self.kv_len) if causal else self.q_len * bool(self.kv_len)

    @cached_property
    def first_of_run(self) -> int | None:
        """The first page's id where the others follow it one by one."""
        ids, count = self.page_ids, self.num_pages
        first = int(ids[0])
        if int(ids[-1]) - first != count - 1:
            return None
        return first if count < 3 or bool((ids[1:] - ids[:-1] == 1).all()) else None


def sequences_of(batch: PagedBatch, page_size: int) -> list[SequencePages]:
    """The batch with its offsets as Python ints. Raises ValueError where they fall or point outside the page table."""
    qo = batch.qo_indptr.tolist()
    q_lens = [end - start for start, end in pairwise(qo)]
    if batch.kv_lens is not None:
        kv_lens, tables = batch.kv_lens.tolist(), list(batch.page_table)
    else:
        kv_lens, tables = _csr_tables(batch, page_size)
    if min(qo) < 0 or min([*q_lens, *kv_lens], default=0) < 0:
        fail("batch", "offsets that never fall", "a negative length", "use cumulative sums")
    found = []
    for start, q_len, kv_len, table in zip(qo, q_lens, kv_lens, tables, strict=False):
        num_pages = -(-kv_len // page_size)
        if num_pages > table.shape[0]:
            got = f"got {table.shape[0]}; fix: pass the whole table"
            raise ValueError(f"batch: expected {num_pages} page ids for {kv_len} keys, {got}")
        found.append(SequencePages(start, q_len, kv_len, num_pages, table[:num_pages]))
    return found


def _csr_tables(batch: PagedBatch, page_size: int) -> tuple[list[int], list[Tensor]]:
    assert batch.kv_indptr is not None
    ptr = batch.kv_indptr.tolist()
    counts = [end - start for start, end in pairwise(ptr)]
    last = [page_size] * len(counts) if batch.last_page_len is None else batch.last_page_len.tolist()
    kv_lens = [(n - 1) * page_size + r if n else 0 for n, r in zip(counts, last, strict=True)]
    return kv_lens, [batch.page_table[max(start, 0) : max(end, 0)] for start, end in pairwise(ptr)]


class PageReader:
    """One cache's keys (or values), a sequence at a time: in place where its pages lie in a row, else copied.

    Args:
        cache: [pages, page_size, kv_heads, dim], any strides with a contiguous last dimension.
        max_keys: keys in all pages of the longest sequence that will be read.
        padded_dim: elements per head in what `read` returns, zeros past the cache's own.
    """

    def __init__(self, cache: Tensor, max_keys: int, padded_dim: int) -> None:
        self._cache, self._max_keys, self._padded_dim = cache, max_keys, padded_dim
        _, page_size, _, dim = cache.shape
        page_stride, token_stride = cache.stride()[:2]
        token_stride = page_stride if page_size == 1 else token_stride
        self._in_place: Tensor | None = None
        # Matrix products take rows of any stride that keeps them apart.
        if dim == padded_dim and token_stride >= dim and page_stride == page_size * token_stride:
            self._in_place = cache.flatten(0, 1).transpose(0, 1)[None]
        self._copies = self._pages = cache

    def read(self, sequence: SequencePages, num_keys: int) -> Tensor:
        """[1, kv_heads, num_keys, padded_dim], valid until the next read; keys past the sequence's own are 0.

        Fewer than num_keys, but all of the sequence's, where they are read in place.
        Raises IndexError for a page outside the cache.
        """
        first, (num_pages, page_size) = sequence.first_of_run, self._cache.shape[:2]
        if self._in_place is not None and first is not None and 0 <= first <= num_pages - sequence.num_pages:
            return self._in_place[:, :, first * page_size : first * page_size + sequence.kv_len]
        if self._copies is self._cache:
            self._allocate()
        torch.index_select(self._cache, 0, sequence.page_ids, out=self._pages[: sequence.num_pages])
        if num_keys > sequence.kv_len:
            self._copies[:, :, sequence.kv_len : num_keys] = 0
        return self._copies[:, :, :num_keys]

    def _allocate(self) -> None:
        _, page_size, kv_heads, dim = self._cache.shape
        spare = page_size * -(-KEY_MULTIPLE // page_size)
        make = torch.empty if dim == self._padded_dim else torch.zeros
        copies = make(self._max_keys + spare, kv_heads, self._padded_dim, dtype=self._cache.dtype)
        self._copies = copies.transpose(0, 1)[None]
        self._pages = copies.unflatten(0, (-1, page_size))[..., :dim]
