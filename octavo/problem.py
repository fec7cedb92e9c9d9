"""What is to be computed: frozen, self-validating, printable values. Nothing here touches tensor contents."""

import math
from dataclasses import dataclass

import torch

from octavo.errors import fail
from octavo.shapes import BlockTable, Indptr, PageIds, PerSequence, Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INDEX_DTYPES = (torch.int32, torch.int64)
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256


@dataclass(frozen=True)
class AttentionSpec:
    """The static part of a problem: everything that selects a kernel, nothing that changes from step to step.

    Args:
        num_qo_heads: query heads Hq.
        num_kv_heads: K/V heads Hkv; must divide Hq. Query head h reads K/V head h // (Hq / Hkv).
        head_dim: elements per query and key head, 16 to 256.
        value_dim: elements per value head, 16 to 256; None means head_dim.
        page_size: keys per page, any integer >= 1.
        causal: bottom-right aligned: query i of a sequence sees keys j <= i + kv_len - q_len.
        dtype: of q, k and v: bfloat16, float16 or float32.

    Raises:
        ValueError, TypeError: with what was expected, what came and how to fix it.

    >>> AttentionSpec(num_qo_heads=32, num_kv_heads=4, head_dim=128).group_size
    8
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None
    page_size: int = 1
    causal: bool = True
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.value_dim is None:
            object.__setattr__(self, "value_dim", self.head_dim)
        for name in ("num_qo_heads", "num_kv_heads", "head_dim", "value_dim", "page_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                fail(name, "an int", repr(value), "pass a plain Python int", TypeError)
            if value < 1:
                fail(name, "at least 1", value, f"pass the model's {name}")
        for name in ("head_dim", "value_dim"):
            if not MIN_HEAD_DIM <= getattr(self, name) <= MAX_HEAD_DIM:
                limits = f"{MIN_HEAD_DIM} to {MAX_HEAD_DIM}"
                fail(name, limits, getattr(self, name), "pad the heads with zeros and pass the unpadded sm_scale")
        if self.num_qo_heads % self.num_kv_heads:
            multiple = f"a multiple of num_kv_heads={self.num_kv_heads}"
            fail("num_qo_heads", multiple, self.num_qo_heads, "every K/V head serves the same number of query heads")
        if not isinstance(self.causal, bool):
            fail("causal", "a bool", repr(self.causal), "pass True or False", TypeError)
        if self.dtype not in DTYPES:
            fail("dtype", "bfloat16, float16 or float32", self.dtype, "cast q, k and v", TypeError)

    @property
    def group_size(self) -> int:
        """Query heads per K/V head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def v_dim(self) -> int:
        """value_dim as an int."""
        assert self.value_dim is not None  # set in __post_init__
        return self.value_dim

    @property
    def default_scale(self) -> float:
        """1 / sqrt(head_dim)."""
        return 1.0 / math.sqrt(self.head_dim)


@dataclass(frozen=True, eq=False)
class PagedBatch:
    """One step's batch: where each sequence's queries and pages are. Build it with `csr` or `dense`; nothing is copied.

    qo_indptr [B + 1]: token offsets of each sequence's queries.
    page_table: kv_indices [entries] (CSR) or block_table [B, max_pages] (dense): page ids.
    kv_indptr [B + 1], last_page_len [B]: CSR only; last_page_len may be None when page_size is 1.
    kv_lens [B]: dense only; keys of each sequence.

    Index tensors are int32 or int64, each its own, all on one device.
    """

    qo_indptr: Indptr
    page_table: Tensor
    kv_indptr: Indptr | None = None
    last_page_len: PerSequence | None = None
    kv_lens: PerSequence | None = None

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


@dataclass(frozen=True)
class Arch:
    """The device that a kernel is chosen for."""

    kind: str
    """"cpu", "cuda", "hip", or "interpreter" (Triton's, on the CPU)."""
    capability: tuple[int, int] = (0, 0)
    num_sms: int = 1
    name: str = "CPU"

    @property
    def sm(self) -> int:
        """Compute capability as one number: 90 for sm_90, 0 where there is none."""
        return 10 * self.capability[0] + self.capability[1]
