"""Write new tokens' keys and values into the pages that a batch gives them."""

import torch

from octavo import ops
from octavo.errors import fail
from octavo.kv_cache import PagedKV
from octavo.problem import AttentionSpec, PagedBatch
from octavo.shapes import NewKeys, NewValues
from octavo.validation import (
    check_batch,
    check_cache,
    check_device,
    check_last_dim,
    check_no_grad,
    check_shape,
    check_values,
    check_writable,
)


def append(k: NewKeys, v: NewValues, kv: PagedKV, batch: PagedBatch, *, validate: bool = False) -> None:
    """Write k and v at the end of their sequences, so that attention over the same `batch` sees them.

    Args:
        k: [tokens, kv_heads, head_dim], dtype of the cache.
        v: [tokens, kv_heads, value_dim].
        kv: the cache, written in place.
        batch: page tables in which each sequence's length already counts its new tokens: token i of a sequence goes to
            position kv_len - q_len + i. Tokens at negative positions, and rows past qo_indptr[-1], are not written.
        validate: also check index values on a GPU, which synchronises; on the CPU they always are. Without it, a page
            id outside the cache is skipped on a GPU.

    Raises:
        ValueError, TypeError: what was expected, what came, how to fix it; nothing is written.
    """
    # The cache's own shape is the spec: append has no queries, so query heads are taken to be K/V heads.
    spec = AttentionSpec(
        kv.num_kv_heads, kv.num_kv_heads, kv.k_cache.shape[3], kv.v_cache.shape[3], kv.page_size, dtype=kv.k_cache.dtype
    )
    check_cache(spec, kv)
    check_batch(spec, batch)
    check_shape("k", k, (None, spec.num_kv_heads, spec.head_dim))
    check_shape("v", v, (k.shape[0], spec.num_kv_heads, spec.v_dim))
    for name, x in (("k", k), ("v", v)):
        if x.dtype != spec.dtype:
            fail(name, f"dtype {spec.dtype} like the cache", x.dtype, f"{name}.to({spec.dtype})", TypeError)
        check_last_dim(name, x)
        check_device(name, x, kv.k_cache.device)
    check_writable("k_cache", kv.k_cache)
    check_writable("v_cache", kv.v_cache)
    check_device("qo_indptr", batch.qo_indptr, kv.k_cache.device)
    check_no_grad(k=k, v=v, k_cache=kv.k_cache, v_cache=kv.v_cache)
    if (validate or k.device.type == "cpu") and not torch.compiler.is_compiling():
        check_values(spec, batch, k.shape[0], kv.num_pages)
    ops.append(k, v, kv.k_cache, kv.v_cache, ops.pack_batch(batch))
