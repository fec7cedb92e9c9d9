"""FlashInfer's caches, layouts and page tables as Octavo's values."""

from typing import NamedTuple

import torch

from octavo.compat.arguments import alibi_slopes, not_carried, positions
from octavo.errors import fail
from octavo.kv_cache import LAYOUTS, PagedKV
from octavo.problem import AttentionSpec, PagedBatch
from octavo.shapes import Tensor

PagedCache = Tensor | tuple[Tensor, Tensor]


def check_layout(kv_layout: str) -> str:
    if kv_layout not in LAYOUTS:
        raise KeyError(f"kv_layout: expected one of {LAYOUTS}, got {kv_layout!r}; fix: 'NHD'")
    return kv_layout


def check_backend(backend: str) -> str:
    """Any of FlashInfer's names: Octavo chooses its own kernel. cuDNN's takes offsets in elements, which differ."""
    if backend == "cudnn":
        not_carried("backend='cudnn'", "its qo_indptr counts elements; pass offsets in tokens and backend='auto'")
    return backend


def paged_kv(cache: PagedCache, kv_layout: str) -> PagedKV:
    """A (k, v) pair, or one tensor [pages, 2, ...]; pages of one key may come without the page dimension."""
    if isinstance(cache, (tuple, list)):
        k, v = cache
        return PagedKV(_with_pages(k, 4, kv_layout), _with_pages(v, 4, kv_layout), kv_layout)
    if not isinstance(cache, Tensor):
        fail(
            "paged_kv_cache",
            "a tensor or a pair of tensors",
            type(cache).__name__,
            "pass (k_cache, v_cache)",
            TypeError,
        )
    return PagedKV.combined(_with_pages(cache, 5, kv_layout), kv_layout)


def _with_pages(x: Tensor, rank: int, kv_layout: str) -> Tensor:
    if isinstance(x, Tensor) and x.dtype == torch.uint8:
        not_carried("nvfp4 caches", "keep the cache in bfloat16, float16 or fp8")
    if isinstance(x, Tensor) and x.dim() == rank - 1:
        return x.unsqueeze(-3 if kv_layout == "NHD" else -2)
    return x


def ragged_kv(k: Tensor, v: Tensor, kv_layout: str) -> PagedKV:
    """Contiguous keys [tokens, heads, dim] (NHD) or [heads, tokens, dim] (HND) as pages of one key; a view."""
    if kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    for x in (k, v):
        if isinstance(x, Tensor) and x.dtype == torch.uint8:
            not_carried("nvfp4 keys and values", "keep them in bfloat16, float16 or fp8")
    return PagedKV(k.unsqueeze(1), v.unsqueeze(1))


def ragged_batch(qo_indptr: Tensor, kv_indptr: Tensor, num_keys: int) -> PagedBatch:
    """Sequence i's keys are rows kv_indptr[i] to kv_indptr[i + 1] of k and v, which have num_keys rows."""
    return PagedBatch.csr(qo_indptr, kv_indptr, positions(num_keys, qo_indptr.device))


class Position(NamedTuple):
    """What pos_encoding_mode asks for."""

    alibi: bool

    @classmethod
    def of(cls, mode: str) -> "Position":
        if mode == "ROPE_LLAMA":
            not_carried("pos_encoding_mode='ROPE_LLAMA'", "rotate q and k before the call, see docs/migration.md")
        if mode not in ("NONE", "ALIBI"):
            raise KeyError(f"pos_encoding_mode: expected 'NONE' or 'ALIBI', got {mode!r}; fix: 'NONE'")
        return cls(mode == "ALIBI")

    def slopes(self, spec: AttentionSpec, device: torch.device) -> Tensor | None:
        return alibi_slopes(spec.num_qo_heads, device) if self.alibi else None
