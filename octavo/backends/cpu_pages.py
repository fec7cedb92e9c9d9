"""Where each sequence's keys are, and reading them out of the pages, on the CPU."""

from dataclasses import dataclass
from itertools import pairwise

import torch

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
    page_ids: Tensor


def sequences_of(batch: PagedBatch, page_size: int) -> list[SequencePages]:
    """The batch with its offsets as Python ints. Raises ValueError where they fall or point outside the page table."""
    qo = batch.qo_indptr.tolist()
    q_lens = [end - start for start, end in pairwise(qo)]
    if batch.kv_lens is not None:
        kv_lens, tables = batch.kv_lens.tolist(), list(batch.page_table)
    else:
        kv_lens, tables = _csr_tables(batch, page_size)
    if min(qo) < 0 or min([*q_lens, *kv_lens], default=0) < 0:
        raise ValueError("batch: expected offsets that never fall, got a negative length; fix: use cumulative sums")
    found = []
    for start, q_len, kv_len, table in zip(qo, q_lens, kv_lens, tables, strict=False):
        num_pages = -(-kv_len // page_size)
        if num_pages > len(table):
            raise ValueError(f"batch: expected {num_pages} page ids, got {len(table)}; fix: pass the whole table")
        found.append(SequencePages(start, q_len, kv_len, table[:num_pages]))
    return found


def _csr_tables(batch: PagedBatch, page_size: int) -> tuple[list[int], list[Tensor]]:
    assert batch.kv_indptr is not None
    ptr = batch.kv_indptr.tolist()
    counts = [end - start for start, end in pairwise(ptr)]
    last = [page_size] * len(counts) if batch.last_page_len is None else batch.last_page_len.tolist()
    kv_lens = [(n - 1) * page_size + r if n else 0 for n, r in zip(counts, last, strict=True)]
    return kv_lens, [batch.page_table[max(start, 0) : max(end, 0)] for start, end in pairwise(ptr)]


class PageReader:
    """One cache's keys (or values), a sequence at a time, in a buffer that all sequences of a call share.

    Args:
        cache: [pages, page_size, kv_heads, dim], any strides with a contiguous last dimension.
        max_pages: pages of the longest sequence that will be read.
        padded_dim: elements per head in what `read` returns, zeros past the cache's own.
    """

    def __init__(self, cache: Tensor, max_pages: int, padded_dim: int) -> None:
        self._cache, self._max_pages, self._padded_dim = cache, max_pages, padded_dim
        self._buffer: Tensor | None = None

    def read(self, page_ids: Tensor, num_keys: int) -> Tensor:
        """[kv_heads, num_keys or more, padded_dim], valid until the next read; what is more is finite.

        Raises IndexError for a page outside the cache.
        """
        pages = self._view(page_ids)
        if pages is not None:
            return pages.flatten(0, 1)[:num_keys].transpose(0, 1)
        rows = self._gather(page_ids)
        end = -(-num_keys // KEY_MULTIPLE) * KEY_MULTIPLE
        # A last page's tail may hold NaN, whose product with a weight of 0 is NaN.
        rows[num_keys:end] = 0
        return rows[:end].transpose(0, 1)

    def _view(self, page_ids: Tensor) -> Tensor | None:
        """The pages where they are, if they lie one after another and PyTorch's kernel can take their strides."""
        _, page_size, _, dim = self._cache.shape
        page_stride, token_stride = self._cache.stride()[:2]
        token_stride = page_stride if page_size == 1 else token_stride
        first, count = int(page_ids[0]), len(page_ids)
        if dim != self._padded_dim or token_stride < dim or first < 0 or first + count > self._cache.shape[0]:
            return None
        if count > 1 and (page_stride != page_size * token_stride or int(page_ids[-1]) != first + count - 1):
            return None
        if count > 2 and not bool((page_ids[1:] - page_ids[:-1] == 1).all()):
            return None
        return self._cache[first : first + count]

    def _gather(self, page_ids: Tensor) -> Tensor:
        """[buffer's keys, kv_heads, padded_dim] of which the first len(page_ids) * page_size are the pages' keys."""
        _, page_size, kv_heads, dim = self._cache.shape
        if self._buffer is None:
            shape = (self._max_pages * page_size + KEY_MULTIPLE, kv_heads, self._padded_dim)
            make = torch.empty if dim == self._padded_dim else torch.zeros
            self._buffer = make(shape, dtype=self._cache.dtype)
        pages = self._buffer[: len(page_ids) * page_size].unflatten(0, (len(page_ids), page_size))
        torch.index_select(self._cache, 0, page_ids, out=pages[..., :dim])
        return self._buffer
