"""Attention over a padded batch, as `generate` and plain forward passes have it: every key is a page of its own.

Keys that padding hides are left out of the page table: no key is copied, and no mask has queries times keys elements.
"""

from collections.abc import Callable
from typing import Any

import torch

from octavo.errors import fail
from octavo.integrations.transformers_plan import planned, spec_of, values_of
from octavo.kv_cache import PagedKV
from octavo.problem import PagedBatch
from octavo.shapes import Tensor


def mask_table(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Transformers' mask function. Instead of a mask it makes, once per forward pass, what the page table needs.

    Returns:
        int32 [batch, 1, 1, kv_length + q_length + 1]: the keys' positions, visible ones first and in order; the
        queries' positions, padding first; the number of visible keys. Positions count from the first key or query
        given. It has four dimensions because Transformers takes a mask with four to be ready for use.

    Raises:
        ValueError: the model wants a mask that is neither causal, sliding-window nor bidirectional.
    """
    kind = _kind_of(mask_function)
    device = attention_mask.device if attention_mask is not None else options.get("device", "cpu")
    keys = torch.arange(kv_length, device=device) + kv_offset
    queries = torch.arange(q_length, device=device) + q_offset
    visible = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
    real = torch.ones(batch_size, q_length, dtype=torch.bool, device=device)
    if kind == "causal":
        visible &= keys < q_offset + q_length
    if attention_mask is not None:
        visible &= _at(attention_mask, keys)
        real = _at(attention_mask, queries) if kind == "causal" else real
    order = torch.argsort(~visible, dim=1, stable=True)
    rows = torch.argsort(real, dim=1, stable=True)
    return torch.cat((order, rows, visible.sum(1, keepdim=True)), dim=1).to(torch.int32)[:, None, None]


def _at(attention_mask: Tensor, positions: Tensor) -> Tensor:
    """The 2-D padding mask at the given positions; False past its end, where a static cache is still empty."""
    last = attention_mask.shape[1] - 1
    return attention_mask.bool()[:, positions.clamp(0, last)] & (positions <= last)


def _kind_of(mask_function: Callable[..., Any] | None) -> str:
    """ "causal" (with or without a sliding window, which reaches attention as a number) or "bidirectional"."""
    from transformers import masking_utils

    if mask_function is None or mask_function is masking_utils.causal_mask_function:
        return "causal"
    if mask_function is masking_utils.bidirectional_mask_function:
        return "bidirectional"
    cells = [cell.cell_contents for cell in getattr(mask_function, "__closure__", None) or ()]
    parts = cells[0] if len(cells) == 1 and isinstance(cells[0], tuple) else ()
    names = [getattr(part, "__qualname__", "") for part in parts]
    if names != ["sliding_window_overlay.<locals>.inner_mask", "causal_mask_function"]:
        fail(
            "attention mask",
            "a causal, sliding-window or bidirectional one, with padding",
            getattr(mask_function, "__qualname__", mask_function),
            "packed sequences: pass cu_seq_lens_q; other masks: model.set_attn_implementation('sdpa')",
        )
    return "causal"


def attend_padded(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
) -> Tensor:
    """[batch, tokens, qo_heads, value_dim] of query [batch, qo_heads, tokens, head_dim], key and value
    [batch, kv_heads, keys, dim] and what `mask_table` made (None: every query is real, every key is there)."""
    batch_size, heads, q_length, _ = query.shape
    kv_length = key.shape[2]
    if mask is None:
        mask = mask_table(batch_size, q_length, kv_length, device=query.device, q_offset=kv_length - q_length)
    _check_table(mask, (batch_size, 1, 1, kv_length + q_length + 1))
    table = mask[:, 0, 0]
    kv, stride = _pages_of(key, value)
    rows = table[:, kv_length : kv_length + q_length].long()
    sequence = torch.arange(batch_size, device=query.device)[:, None]
    tokens = query.transpose(1, 2)
    q = (tokens[sequence, rows] if q_length > 1 else tokens).reshape(batch_size * q_length, heads, query.shape[3])

    def make_batch() -> PagedBatch:
        qo_indptr = torch.arange(batch_size + 1, device=query.device, dtype=torch.int32) * q_length
        pages = table[:, :kv_length] + (sequence * stride).to(torch.int32)
        return PagedBatch.dense(qo_indptr, pages, table[:, -1].contiguous())

    spec = spec_of(module, query, kv, options)
    attn, _ = planned(mask, getattr(module, "layer_idx", None) or 0, stride, spec, q.shape[0], make_batch)
    out = attn.run(q, kv, **values_of(options))[0].view(batch_size, q_length, heads, -1)
    if q_length == 1:
        return out
    padded = torch.empty_like(out)
    padded[sequence, rows] = out
    return padded


def _check_table(mask: Tensor, shape: tuple[int, ...]) -> None:
    if mask.dtype != torch.int32 or tuple(mask.shape) != shape:
        got = f"{mask.dtype} {list(mask.shape)}"
        fix = "pass a 2-D attention_mask to the model, of ones and zeros"
        fail("attention_mask", f"the table {list(shape)} that Octavo's mask function makes", got, fix)


def _pages_of(key: Tensor, value: Tensor) -> tuple[PagedKV, int]:
    """Both [batch, kv_heads, keys, dim] as pages of one key, and the pages from one sequence's first to the next's."""
    strides = [_page_stride(x) for x in (key, value)]
    if strides[0] is None or strides[0] != strides[1]:
        key, value = key.contiguous(), value.contiguous()
        strides = [_page_stride(key)]
    stride = strides[0]
    assert stride is not None  # a contiguous tensor has one
    return PagedKV(_as_pages(key, stride), _as_pages(value, stride)), stride


def _page_stride(x: Tensor) -> int | None:
    """Pages from one sequence's first key to the next one's; None if that is no whole number of keys."""
    sequences, _, keys, _ = x.shape
    between, _, step, inner = x.stride()
    if inner != 1 or step == 0:
        return None
    if keys == 1:
        return 1
    if sequences == 1:
        return keys
    return between // step if between % step == 0 else None


def _as_pages(x: Tensor, stride: int) -> Tensor:
    """A view [pages, 1, kv_heads, dim] over [batch, kv_heads, keys, dim]; pages of different heads may share memory."""
    sequences, heads, keys, dim = x.shape
    step = x.stride(0) if keys == 1 else x.stride(2)
    pages = stride * (sequences - 1) + keys
    return x.as_strided((pages, 1, heads, dim), (step, step, x.stride(1), 1))
