"""FlashAttention's inference functions over Octavo: same arguments, layouts and defaults; LSE in natural logarithm.

Arguments by position are FlashAttention 2's; those that only versions 3 and 4 have are taken by name. Arguments that
only choose a kernel (num_splits, pack_gqa, deterministic, maximum lengths, ...) are accepted and say nothing here.
"""

from collections.abc import Sequence
from typing import Any

from octavo.append import append
from octavo.compat.arguments import not_carried, refuse, spec_for, steps
from octavo.compat.flashinfer.tables import ragged_batch, ragged_kv
from octavo.compat.one_call import attend_as
from octavo.errors import fail
from octavo.kv_cache import PagedKV
from octavo.problem import PagedBatch
from octavo.shapes import Tensor
from octavo.variants import in_base


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    max_seqlen_q: int | None = None,
    scheduler_metadata: Tensor | None = None,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    **others: Any,
) -> Any:
    """Attention over a cache, to which k and v are appended first where given.

    Args:
        q: [sequences, queries, heads, dim]; with cu_seqlens_q [sequences + 1], [tokens, heads, dim].
        k_cache, v_cache: [pages, page_size, kv_heads, dim] with block_table (or page_table) [sequences, max_pages];
            without, [rows, max_keys, kv_heads, dim], sequence i in row cache_batch_idx[i] or i.
        k, v: [sequences, new, kv_heads, dim]; with cu_seqlens_k_new, [new tokens, kv_heads, dim].
        cache_seqlens: keys in the cache before k and v, [sequences] or one int; None is a full cache.
        window_size: (left, right) keys around a query's own position; -1 or None is no limit.

    Returns:
        out in q's shape; with return_softmax_lse also lse float32, natural logarithm: [sequences, heads, queries], or
        [heads, tokens] with cu_seqlens_q. A row that sees no key has out 0 and lse -inf.

    Raises:
        NotImplementedError: names what is not carried, such as rotary_cos.
    """
    refuse(rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_leftpad=cache_leftpad, **others)
    refuse(alibi_slopes_per_sequence=alibi_slopes is not None and alibi_slopes.dim() > 1)
    table = block_table if page_table is None else page_table
    if table is not None and cache_batch_idx is not None:
        not_carried("cache_batch_idx with block_table", "give each sequence its own row of block_table")
    rows, qo_indptr = _packed(q, cu_seqlens_q)
    count = qo_indptr.shape[0] - 1
    if table is None:
        table = (steps(count, 1, q.device) if cache_batch_idx is None else cache_batch_idx)[:, None]
    kv = PagedKV(k_cache, v_cache)
    lengths = _lengths(cache_seqlens, count, table, kv.page_size)
    if k is not None and v is not None:
        new, new_indptr = _packed(k, cu_seqlens_k_new)
        lengths = lengths + (new_indptr[1:] - new_indptr[:-1])
        append(new, _packed(v, cu_seqlens_k_new)[0], kv, PagedBatch.dense(new_indptr, table, lengths))
    elif k is not None or v is not None:
        fail("k and v", "both or neither", "one of them", "pass the new keys and the new values")
    batch = PagedBatch.dense(qo_indptr, table, lengths)
    out, lse = _attend(rows, kv, batch, causal, window_size, softcap, softmax_scale, alibi_slopes, learnable_sink)
    out = out.view(*q.shape[:-1], out.shape[-1])
    return (out, _natural(lse, q)) if return_softmax_lse else out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    page_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    return_softmax_lse: bool = False,
    return_lse: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    scheduler_metadata: Tensor | None = None,
    sm_margin: int = 0,
    **others: Any,
) -> Any:
    """Attention of packed sequences over packed keys, or over pages.

    Args:
        q: [tokens, heads, dim]; cu_seqlens_q [sequences + 1].
        k, v: [keys, kv_heads, dim] with cu_seqlens_k [sequences + 1]; with block_table (or page_table)
            [sequences, max_pages], [pages, page_size, kv_heads, dim], whose lengths are seqused_k [sequences] or the
            differences of cu_seqlens_k.

    Returns:
        out [tokens, heads, value_dim]; with return_softmax_lse or return_lse (out, lse), with return_attn_probs
        (out, lse, None): lse [heads, tokens] float32, natural logarithm.
    """
    refuse(dropout_p=dropout_p, **others)
    refuse(alibi_slopes_per_sequence=alibi_slopes is not None and alibi_slopes.dim() > 1)
    table = block_table if page_table is None else page_table
    if table is not None:
        kv = PagedKV(k, v)
        if seqused_k is None and cu_seqlens_k is None:
            fail("seqused_k", "lengths, or cu_seqlens_k", None, "pass the keys of each sequence")
        lengths = seqused_k
        if lengths is None and cu_seqlens_k is not None:
            lengths = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
        assert lengths is not None
        batch = PagedBatch.dense(cu_seqlens_q, table, lengths)
    else:
        refuse(seqused_k_without_block_table=seqused_k)
        if cu_seqlens_k is None:
            fail("cu_seqlens_k", "offsets of the keys", None, "pass a tensor of one offset per sequence plus one")
        kv = ragged_kv(_dense_last(k), _dense_last(v), "NHD")
        batch = ragged_batch(cu_seqlens_q, cu_seqlens_k, k.shape[0])
    rows = _dense_last(q)
    out, lse = _attend(rows, kv, batch, causal, window_size, softcap, softmax_scale, alibi_slopes, learnable_sink)
    if return_attn_probs:
        return out, _natural(lse, q), None
    return (out, _natural(lse, q)) if return_softmax_lse or return_lse else out


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of equally long sequences: q [sequences, queries, heads, dim], k, v [sequences, keys, kv_heads, dim].

    Returns:
        out in q's shape; with return_attn_probs (out, lse [sequences, heads, queries], None).
    """
    refuse(dropout_p=dropout_p)
    options: dict[str, Any] = {
        "causal": causal,
        "window_size": window_size,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
    }
    result = flash_attn_with_kvcache(
        q, k, v, softmax_scale=softmax_scale, return_softmax_lse=return_attn_probs, **options
    )
    return (*result, None) if return_attn_probs else result


def _attend(
    q: Tensor,
    kv: PagedKV,
    batch: PagedBatch,
    causal: bool,
    window_size: Sequence[int | None],
    softcap: float,
    softmax_scale: float | None,
    alibi_slopes: Tensor | None,
    sink: Tensor | None,
) -> tuple[Tensor, Tensor]:
    left, right = (-1 if n is None or n < 0 else n for n in window_size)
    causal = causal or right == 0
    spec = spec_for(
        (q.shape[1], kv.num_kv_heads),
        (q.shape[2], kv.v_cache.shape[3]),
        kv.page_size,
        causal,
        q.dtype,
        kv.k_cache.dtype,
        window_left=left,
        window_right=-1 if causal else right,
        logits_soft_cap=softcap,
        alibi=alibi_slopes is not None,
        sinks=sink is not None,
    )
    sinks = None if sink is None else sink.float()
    return attend_as(spec, q, kv, batch, sm_scale=softmax_scale, alibi_slopes=alibi_slopes, sinks=sinks)


def _packed(x: Tensor, indptr: Tensor | None) -> tuple[Tensor, Tensor]:
    """([tokens, heads, dim], offsets) of packed or of equally long sequences."""
    x = _dense_last(x)
    if indptr is not None:
        return x, indptr
    if x.dim() != 4:
        fail("q, k and v", "4 dimensions, or offsets", f"shape {list(x.shape)}", "pass cu_seqlens_q, cu_seqlens_k_new")
    return x.reshape(-1, *x.shape[2:]), steps(x.shape[0] + 1, x.shape[1], x.device)


def _dense_last(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _lengths(given: int | Tensor | None, count: int, table: Tensor, page_size: int) -> Tensor:
    if isinstance(given, Tensor):
        return given
    length = table.shape[1] * page_size if given is None else int(given)
    return table.new_full((count,), length)


def _natural(lse: Tensor, q: Tensor) -> Tensor:
    """Base 2 [tokens, heads] to natural logarithm in FlashAttention's layout."""
    lse = in_base(lse, "e")
    return lse.T if q.dim() == 3 else lse.view(*q.shape[:3]).transpose(1, 2)


__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]
