"""One step's batch: where each sequence's queries and pages are, and which keys its rows see. No contents are read."""

import dataclasses
from dataclasses import dataclass

import torch

from octavo.errors import fail
from octavo.shapes import BlockTable, Indptr, PageIds, PerSequence, Tensor

INDEX_DTYPES = (torch.int32, torch.int64)
MASK_DTYPES = (torch.bool, torch.uint8)


@dataclass(frozen=True, eq=False)
class PagedBatch:
    """One step's batch: where each sequence's queries and pages are. Build it with `csr` or `dense`; nothing is copied.

    qo_indptr [B + 1]: token offsets of each sequence's queries.
    page_table: kv_indices [entries] (CSR) or block_table [B, max_pages] (dense): page ids.
    kv_indptr [B + 1], last_page_len [B]: CSR only; last_page_len may be None when page_size is 1.
    kv_lens [B]: dense only; keys of each sequence.
    custom_mask, mask_indptr [B + 1]: see `with_mask`.

    Index tensors are int32 or int64, each its own, all on one device.
    """

    qo_indptr: Indptr
    page_table: Tensor
    kv_indptr: Indptr | None = None
    last_page_len: PerSequence | None = None
    kv_lens: PerSequence | None = None
    custom_mask: Tensor | None = None
    mask_indptr: Indptr | None = None

    @classmethod
    def csr(
        cls, qo_indptr: Indptr, kv_indptr: Indptr, kv_indices: PageIds, last_page_len: PerSequence | None = None
    ) -> "PagedBatch":
        """FlashInfer's form. Raises ValueError or TypeError when shapes, dtypes or devices do not fit together."""
        for name, x in (("qo_indptr", qo_indptr), ("kv_indptr", kv_indptr), ("kv_indices", kv_indices)):
            _check_index(name, x, rank=1)
        batch_size = _check_indptr(qo_indptr)
        if kv_indptr.shape[0] != batch_size + 1:
            same = f"as many elements as qo_indptr ({batch_size + 1})"
            fail("kv_indptr", same, kv_indptr.shape[0], "both hold one offset per sequence plus one")
        if last_page_len is not None:
            _check_index("last_page_len", last_page_len, rank=1)
            _check_per_sequence("last_page_len", last_page_len, batch_size)
        batch = cls(qo_indptr, kv_indices, kv_indptr=kv_indptr, last_page_len=last_page_len)
        batch._check_one_device()
        return batch

    @classmethod
    def dense(cls, qo_indptr: Indptr, block_table: BlockTable, kv_lens: PerSequence) -> "PagedBatch":
        """vLLM's and FlashAttention's form: block_table [B, max_pages], kv_lens [B]. No conversion copy is made.

        Entries of block_table past a sequence's last page are never read.
        """
        _check_index("qo_indptr", qo_indptr, rank=1)
        _check_index("block_table", block_table, rank=2)
        _check_index("kv_lens", kv_lens, rank=1)
        batch_size = _check_indptr(qo_indptr)
        _check_per_sequence("kv_lens", kv_lens, batch_size)
        _check_per_sequence("block_table", block_table, batch_size)
        batch = cls(qo_indptr, block_table, kv_lens=kv_lens)
        batch._check_one_device()
        return batch

    def with_mask(self, custom_mask: Tensor, mask_indptr: Indptr | None = None) -> "PagedBatch":
        """The same batch with a mask per sequence, for specs with custom_mask: True where a row sees a key.

        Args:
            custom_mask: [>= mask_indptr[-1]]: bool, each sequence's q_len x kv_len flattened row by row; or packed
                uint8, the same 8 elements a byte from the lowest bit up, each sequence starting at a byte.
            mask_indptr: [B + 1] int32 or int64: where each sequence begins, in elements, or in bytes when packed. None:
                the masks follow each other in order without gaps.
        """
        if not isinstance(custom_mask, Tensor):
            fail("custom_mask", "a tensor", type(custom_mask).__name__, "flatten the masks to one tensor", TypeError)
        if custom_mask.dtype not in MASK_DTYPES:
            fail("custom_mask", "bool, or uint8 (packed)", custom_mask.dtype, "custom_mask.to(torch.bool)", TypeError)
        if custom_mask.dim() != 1 or not custom_mask.is_contiguous():
            got = f"shape {list(custom_mask.shape)}, strides {custom_mask.stride()}"
            fail("custom_mask", "1 contiguous dimension", got, "torch.cat([mask.flatten() for mask in masks])")
        if mask_indptr is not None:
            _check_index("mask_indptr", mask_indptr, rank=1)
            if mask_indptr.shape != self.qo_indptr.shape:
                same = f"as many elements as qo_indptr ({self.qo_indptr.shape[0]})"
                fail("mask_indptr", same, mask_indptr.shape[0], "both hold one offset per sequence plus one")
        batch = dataclasses.replace(self, custom_mask=custom_mask, mask_indptr=mask_indptr)
        for name, x in (("custom_mask", custom_mask), ("mask_indptr", mask_indptr)):
            if x is not None and x.device != self.device:
                fail(name, f"on {self.device} like qo_indptr", x.device, "keep masks and index tensors on one device")
        return batch

    def with_mask_indptr(self, page_size: int) -> "PagedBatch":
        """This batch where it has no mask or has mask_indptr; else the same with it (int64). Nothing is read back."""
        if self.custom_mask is None or self.mask_indptr is not None:
            return self
        offsets = torch.nn.functional.pad(self.mask_sizes(page_size).cumsum(0), (1, 0))
        return dataclasses.replace(self, mask_indptr=offsets)

    def mask_sizes(self, page_size: int) -> Tensor:
        """What each sequence takes of custom_mask [B], int64: elements, or bytes when packed."""
        assert self.custom_mask is not None
        sizes = self.q_lengths() * self.kv_lengths(page_size)
        return (sizes + 7) // 8 if self.custom_mask.dtype == torch.uint8 else sizes

    def q_lengths(self) -> Tensor:
        """Queries of each sequence [B], int64."""
        return (self.qo_indptr[1:] - self.qo_indptr[:-1]).long()

    def kv_lengths(self, page_size: int) -> Tensor:
        """Keys of each sequence [B], int64."""
        if self.kv_lens is not None:
            return self.kv_lens.long()
        assert self.kv_indptr is not None
        pages = (self.kv_indptr[1:] - self.kv_indptr[:-1]).long()
        last = page_size if self.last_page_len is None else self.last_page_len.long()
        return torch.where(pages > 0, (pages - 1) * page_size + last, 0)

    def _check_one_device(self) -> None:
        for name, x in self.tensors().items():
            if x.device != self.device:
                fail(name, f"on {self.device} like qo_indptr", x.device, "keep all index tensors on one device")

    def tensors(self) -> dict[str, Tensor]:
        """The index tensors that are set, by their public names."""
        named = {
            "qo_indptr": self.qo_indptr,
            "block_table" if self.is_dense else "kv_indices": self.page_table,
            "kv_indptr": self.kv_indptr,
            "last_page_len": self.last_page_len,
            "kv_lens": self.kv_lens,
        }
        return {name: x for name, x in named.items() if x is not None}

    def fields(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """(qo_indptr, page_table, kv_indptr, last_page_len, kv_lens)."""
        return self.qo_indptr, self.page_table, self.kv_indptr, self.last_page_len, self.kv_lens

    def to(self, device: torch.device | str) -> "PagedBatch":
        """The same batch with all index tensors on `device`."""

        def move(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.to(device)

        return PagedBatch(
            self.qo_indptr.to(device),
            self.page_table.to(device),
            move(self.kv_indptr),
            move(self.last_page_len),
            move(self.kv_lens),
            move(self.custom_mask),
            move(self.mask_indptr),
        )

    @property
    def is_dense(self) -> bool:
        return self.kv_lens is not None

    @property
    def num_sequences(self) -> int:
        return self.qo_indptr.shape[0] - 1

    @property
    def device(self) -> torch.device:
        return self.qo_indptr.device

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}={list(x.shape)}" for name, x in self.tensors().items())
        if self.custom_mask is not None:
            shapes += f", custom_mask={list(self.custom_mask.shape)} {self.custom_mask.dtype}"
        return f"PagedBatch({'dense' if self.is_dense else 'csr'}, {shapes}, {self.device})"


def _check_index(name: str, x: object, rank: int) -> None:
    if not isinstance(x, Tensor):
        fail(name, "a tensor", type(x).__name__, "torch.tensor(..., dtype=torch.int32)", TypeError)
    if x.dtype not in INDEX_DTYPES:
        fail(name, "int32 or int64", x.dtype, f"{name}.to(torch.int32)", TypeError)
    if x.dim() != rank:
        fail(name, f"{rank} dimension(s)", f"shape {list(x.shape)}", "see PagedBatch for its shape")
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        fail(name, "a contiguous last dimension", f"strides {x.stride()}", f"{name}.contiguous()")


def _check_indptr(qo_indptr: Tensor) -> int:
    if qo_indptr.shape[0] < 1:
        fail("qo_indptr", "at least one element", "none", "an empty batch is torch.tensor([0])")
    return qo_indptr.shape[0] - 1


def _check_per_sequence(name: str, x: Tensor, batch_size: int) -> None:
    if x.shape[0] != batch_size:
        fail(name, f"one row per sequence ({batch_size})", x.shape[0], "qo_indptr has one element more")
