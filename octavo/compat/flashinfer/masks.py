"""Custom masks where graphs read them: packed into a fixed buffer, by device operations alone."""

import torch

from octavo.problem import PagedBatch
from octavo.shapes import Tensor


def with_mask(
    batch: PagedBatch, custom_mask: Tensor | None, packed: Tensor | None, mask_indptr: Tensor | None = None
) -> PagedBatch:
    """The batch under a mask: packed bits take precedence, as in FlashInfer."""
    mask = custom_mask if packed is None else packed
    if mask is None:
        return batch
    return batch.with_mask(mask.to(torch.bool).reshape(-1) if packed is None else mask, mask_indptr)


def byte_offsets(sizes: Tensor) -> Tensor:
    """[sequences + 1] int64: where each sequence's bits begin, as each begins at a byte; sizes [sequences] in bits."""
    return torch.nn.functional.pad(((sizes.long() + 7) // 8).cumsum(0), (1, 0))


def pack(mask: Tensor, sizes: Tensor) -> Tensor:
    """Bits of the flattened mask, the first of a byte lowest, each sequence at byte_offsets(sizes).

    uint8 of as many bytes as any sizes of so many elements and sequences need; those unused are 0.
    """
    ends = sizes.long().cumsum(0)
    bit = torch.arange(mask.numel(), device=mask.device)
    sequence = torch.searchsorted(ends, bit, right=True).clamp(max=len(sizes) - 1)
    own = bit - (ends - sizes)[sequence]
    values = mask.reshape(-1).to(torch.bool).int() << (own % 8).int()
    made = torch.zeros(mask.numel() // 8 + len(sizes), dtype=torch.int32, device=mask.device)
    return made.index_add_(0, byte_offsets(sizes)[sequence] + own // 8, values).to(torch.uint8)
