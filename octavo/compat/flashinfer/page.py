"""flashinfer.page: where new tokens go, and writing them. Every step is a device operation; nothing is read back."""

import torch

from octavo.append import append
from octavo.compat.arguments import positions as counting
from octavo.compat.arguments import to_device
from octavo.compat.flashinfer.tables import PagedCache, check_layout, paged_kv
from octavo.problem import PagedBatch
from octavo.shapes import Indptr, NewKeys, NewValues, PageIds, PerSequence, Tensor


def get_seq_lens(kv_indptr: Indptr, kv_last_page_len: PerSequence, page_size: int) -> Tensor:
    """Keys of each sequence [sequences]."""
    return (kv_indptr[1:] - kv_indptr[:-1] - 1).clamp(min=0) * page_size + kv_last_page_len


def get_batch_indices_positions(
    append_indptr: Indptr,
    seq_lens: PerSequence,
    nnz: int,
    batch_indices: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Of each of `nnz` new tokens: its sequence, and its position, where seq_lens already counts the new tokens.

    int32 [nnz] each, written into the given buffers if any. Tokens past append_indptr[-1]: sequence -1, position 0.
    """
    device = append_indptr.device
    token = counting(nnz, device)
    sequence = torch.searchsorted(append_indptr[1:].contiguous(), token.to(append_indptr.dtype), right=True)
    beyond = sequence >= append_indptr.shape[0] - 1
    clipped = sequence.clamp(max=max(append_indptr.shape[0] - 2, 0))
    ends = append_indptr[1:][clipped]
    where = to_device(seq_lens, device)[clipped] - ends + token
    made = (sequence.masked_fill(beyond, -1), where.masked_fill(beyond, 0))
    buffers = (batch_indices, positions)
    for buffer, values in zip(buffers, made, strict=True):
        if buffer is not None:
            buffer.copy_(values)
    first, second = (x.to(torch.int32) if b is None else b for b, x in zip(buffers, made, strict=True))
    return first, second


def append_paged_kv_cache(
    append_key: NewKeys,
    append_value: NewValues,
    batch_indices: Tensor,
    positions: Tensor,
    paged_kv_cache: PagedCache,
    kv_indices: PageIds,
    kv_indptr: Indptr,
    kv_last_page_len: PerSequence,
    kv_layout: str = "NHD",
) -> None:
    """Write token i's key and value at position positions[i] of sequence batch_indices[i]; -1 there skips it."""
    kv = paged_kv(paged_kv_cache, check_layout(kv_layout))
    if append_key.shape[0] == 0 or kv_indices.shape[0] == 0:
        return
    # Each token is a sequence of one query whose one page is the one that it goes to.
    page = torch.div(positions, kv.page_size, rounding_mode="floor")
    entry = kv_indptr[batch_indices.clamp(min=0).long()] + page
    table = kv_indices[entry.clamp(0, kv_indices.shape[0] - 1).long()][:, None]
    keys = (positions % kv.page_size + 1).masked_fill(batch_indices < 0, 0)
    indptr = counting(append_key.shape[0] + 1, append_key.device)
    append(append_key, append_value, kv, PagedBatch.dense(indptr, table.contiguous(), keys))


__all__ = ["append_paged_kv_cache", "get_batch_indices_positions", "get_seq_lens"]
