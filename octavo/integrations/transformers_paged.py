"""Attention over a packed batch, as continuous batching has it: the cache is read where it lies, page by page."""

from collections.abc import Callable
from typing import Any

import torch

from octavo.append import append
from octavo.errors import fail
from octavo.integrations.transformers_plan import planned, spec_of, values_of
from octavo.kv_cache import PagedKV
from octavo.problem import PagedBatch
from octavo.shapes import Tensor

PAGED_NAME = "octavo_flash_2"
"""The name under which `generate_batch` runs. Transformers uses CUDA graphs, asynchronous batches and block tables only
with implementations that are named like FlashAttention 2 or 3; its later versions take no other names at all."""


def attend_packed(module: Any, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
    """[1, tokens, qo_heads, value_dim] of query [1, qo_heads, tokens, head_dim] and key, value [1, kv_heads, n, dim].

    `options` are Transformers' keyword arguments, which differ between its versions:

    - `cache` (5.17) or `k_cache` (later): key and value hold new tokens only. They go into their pages, which are then
      read in place. A layer with a sliding window has a ring instead of pages, which Transformers gathers.
    - neither: key and value are all keys, one sequence's after another's.
    """
    cache = options.get("cache")
    if cache is not None:
        return _attend_cache(module, query, key, value, cache, options)
    if options.get("k_cache") is None:
        return _attend_gathered(module, query, key, value, options)
    kv, table = PagedKV(options["k_cache"], options["v_cache"]), options.get("block_table")
    if table is None:
        table = (options["positions"], -(-int(options["max_length_k"]) // kv.page_size))
    return _attend_pages(module, query, key, value, kv, table, "", options)


@torch.compiler.disable
def keep_in_pages(
    original: Callable[..., Any], cache: Any, key: Tensor, value: Tensor, layer_idx: int, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """In place of the method of Transformers' cache that gathers all keys before it calls an attention function.

    New keys and values are handed on as they are, with the layer's pages and the positions of its keys in `kwargs`.
    Layers with a sliding window, other implementations and steps with block tables go to `original`.
    """
    allocator = cache.layer_to_allocator[layer_idx]
    is_ours = cache.config._attn_implementation == PAGED_NAME and allocator.supports_block_table
    if not is_ours or kwargs.get("block_table") is not None:
        return original(cache, key, value, layer_idx, kwargs=kwargs)
    read, write = (kwargs[name][allocator.index] for name in ("read_index", "write_index"))
    k_cache, v_cache = allocator.get_cache_for_block_table(layer_idx)
    kwargs.update(k_cache=k_cache, v_cache=v_cache, positions=read if read.numel() else write, slots=write)
    for name in ("cu_seq_lens_k", "max_length_k"):
        kwargs[name] = kwargs[name][allocator.layer_type]
    return key, value


def _attend_cache(
    module: Any, query: Tensor, key: Tensor, value: Tensor, cache: Any, options: dict[str, Any]
) -> Tensor:
    """Over Transformers 5.17's cache, whose layers lie in groups that share page ids."""
    group, layer = cache.layer_index_to_group_indices[module.layer_idx]
    window = cache.sliding_windows[module.layer_idx]
    kind = "full_attention" if window == 1 else "sliding_attention"
    options = {**options, "cu_seq_lens_k": _of(options["cu_seq_lens_k"], kind)}
    if window != 1:
        index = {"read_index": options["read_index"], "write_index": options["write_index"]}
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, **index)
        key, value = key.transpose(0, 1).unsqueeze(0), value.transpose(0, 1).unsqueeze(0)
        return _attend_gathered(module, query, key, value, {**options, "sliding_window": window})
    shape = (-1, cache.block_size, cache.num_key_value_heads, cache.head_dim)
    kv = PagedKV(cache.key_cache[layer].view(shape), cache.value_cache[layer].view(shape))
    table = options.get("block_table")
    if table is None:
        keys = _of(options.get("max_seqlen_k", options.get("max_length_k")), kind)
        read, write = options["read_index"][group], options["write_index"][group]
        table = (read if read.numel() else write, -(-int(keys) // cache.block_size))
        options["slots"] = write
    else:
        table = table[group]
    return _attend_pages(module, query, key, value, kv, table, group, options)


def _of(per_kind: Any, kind: str) -> Any:
    return per_kind[kind] if isinstance(per_kind, dict) else per_kind


def _attend_pages(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv: PagedKV,
    table: Any,
    group: int | str,
    options: dict[str, Any],
) -> Tensor:
    """New keys and values go into their pages, then all are read there.

    table: block_table [sequences, max_pages], or (positions in the cache of every sequence's keys, pages to a row).
    """
    offsets, slots = options["cu_seq_lens_k"], options.get("slots")
    if torch.is_grad_enabled():
        fail("continuous batching", "no gradients (it writes to the cache)", "grad mode", "use torch.no_grad()")

    def make_batch() -> PagedBatch:
        block_table = table
        if isinstance(table, tuple):
            positions, pages = table
            block_table = _table_of_positions(positions, pages, offsets, kv.page_size)
        return PagedBatch.dense(options["cu_seq_lens_q"], block_table, offsets[1:] - offsets[:-1])

    q = query[0].transpose(0, 1)
    spec = spec_of(module, query, kv, options)
    attn, batch = planned(offsets, module.layer_idx, group, spec, q.shape[0], make_batch)
    _store(key[0].transpose(0, 1), value[0].transpose(0, 1), kv, batch, slots)
    return attn.run(q, kv, **values_of(options))[0].unsqueeze(0)


def _store(key: Tensor, value: Tensor, kv: PagedKV, batch: PagedBatch, slots: Tensor | None) -> None:
    """Write new keys and values [tokens, kv_heads, dim] into the cache; slots: their positions in it, where known."""
    if slots is None or key.device.type != "cpu":
        append(key, value, kv, batch)
        return
    # The CPU checks every value that append gets, in every layer; these copies check the positions by themselves.
    kv.k_cache.view(-1, *key.shape[1:]).index_copy_(0, slots, key)
    kv.v_cache.view(-1, *value.shape[1:]).index_copy_(0, slots, value)


def _table_of_positions(positions: Tensor, pages: int, offsets: Tensor, page_size: int) -> Tensor:
    """[sequences, pages] page ids from the positions in the cache of every sequence's keys, one sequence after another.
    Entries past a sequence's last page are never read."""
    first = offsets[:-1, None] + torch.arange(pages, device=positions.device) * page_size
    return (positions[first.clamp(max=positions.shape[0] - 1)] // page_size).to(torch.int32)


def _attend_gathered(module: Any, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
    """Keys of one sequence after another, each a page of its own."""
    qo_indptr, kv_indptr = options["cu_seq_lens_q"], options["cu_seq_lens_k"]

    def make_batch() -> PagedBatch:
        everything = torch.arange(key.shape[2], device=key.device, dtype=torch.int32)
        return PagedBatch.csr(qo_indptr.to(torch.int32), kv_indptr.to(torch.int32), everything)

    q = query[0].transpose(0, 1)
    kv = PagedKV(key[0].transpose(0, 1).unsqueeze(1), value[0].transpose(0, 1).unsqueeze(1))
    spec = spec_of(module, query, kv, options)
    attn, _ = planned(kv_indptr, module.layer_idx, "gathered", spec, q.shape[0], make_batch)
    return attn.run(q, kv, **values_of(options))[0].unsqueeze(0)
