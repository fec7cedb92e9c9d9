"""compat.flash_attn against the oracle: FlashAttention's layouts, appended keys, natural-log LSE and refusals."""

import math
from dataclasses import replace

import pytest
import torch
from inputs import FP32, I32, Case, Problem, append_in_loops, build, indptr, new_tokens
from tolerance import assert_matches

from octavo import PagedBatch, PagedKV
from octavo.compat.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

DECODE = Case("decode", (2, 2, 2), (20, 7, 33), page_size=4, dtype=FP32, dense=True, padding=0)
VARLEN = Case("varlen", (3, 0, 1, 18), (20, 7, 33, 18), page_size=4, dtype=FP32, dense=True, padding=0)


def base_2(lse: torch.Tensor) -> torch.Tensor:
    """[sequences, heads, queries] or [heads, tokens], natural, to [tokens, heads], base 2."""
    rows = lse.transpose(-1, -2)
    return rows.reshape(-1, rows.shape[-1]) / math.log(2)


def by_sequence(x: torch.Tensor, count: int) -> torch.Tensor:
    return x.view(count, -1, *x.shape[1:])


@pytest.mark.parametrize("causal", (True, False))
@pytest.mark.parametrize("name", ("block_table", "page_table"))
def test_kvcache_over_pages(causal, name):
    p = build(replace(DECODE, causal=causal))
    q = by_sequence(p.q, 3)
    tables = {name: p.batch.page_table, "cache_seqlens": p.batch.kv_lens}
    options = {"causal": causal, "return_softmax_lse": True} | tables
    out, lse = flash_attn_with_kvcache(q, p.kv.k_cache, p.kv.v_cache, **options)
    assert out.shape == q.shape and lse.shape == (3, 4, 2) and lse.dtype == FP32
    assert_matches(p, out.flatten(0, 1), base_2(lse))


def test_kvcache_of_packed_queries():
    p = build(VARLEN)
    out, lse = flash_attn_with_kvcache(
        p.q,
        p.kv.k_cache,
        p.kv.v_cache,
        cache_seqlens=p.batch.kv_lens,
        page_table=p.batch.page_table,
        cu_seqlens_q=p.batch.qo_indptr,
        max_seqlen_q=18,
        causal=True,
        softmax_scale=0.3,
        return_softmax_lse=True,
    )
    assert out.shape == p.q.shape and lse.shape == (4, len(p.q))
    assert_matches(replace(p, sm_scale=0.3), out, base_2(lse))


def appended(p: Problem, q_lens: torch.Tensor):
    """(new keys, new values, the caches afterwards, lengths before) of a call that appends every query's own key."""
    k, v = new_tokens(p)
    after = append_in_loops(p, k, v)
    return k, v, after, p.batch.kv_lens - q_lens


@pytest.mark.parametrize("packed", (False, True))
def test_new_keys_are_appended_first(packed):
    p = build(DECODE)
    k, v, after, before = appended(p, torch.full((3,), 2, dtype=I32))
    caches = p.kv.k_cache, p.kv.v_cache
    tables = {"cache_seqlens": before, "block_table": p.batch.page_table}
    if packed:
        offsets = {"cu_seqlens_q": p.batch.qo_indptr, "cu_seqlens_k_new": p.batch.qo_indptr}
        out = flash_attn_with_kvcache(p.q, *caches, k, v, **tables, **offsets, causal=True)
    else:
        new = by_sequence(k, 3), by_sequence(v, 3)
        out = flash_attn_with_kvcache(by_sequence(p.q, 3), *caches, *new, **tables, causal=True).flatten(0, 1)
    for cache, exact in zip(caches, after, strict=True):
        torch.testing.assert_close(cache, exact, rtol=0, atol=0, equal_nan=True)
    exact, _ = replace(p, kv=PagedKV(*after)).expected()
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6)


def test_finished_sequences_of_a_graph_are_left_alone():
    """Length -1 and a table of -1: nothing is appended, and out is 0."""
    p = build(replace(DECODE, qo_lens=(1, 1, 1)))
    k, v = (by_sequence(x, 3) for x in new_tokens(p))
    before = p.batch.kv_lens - 1
    before[1] = -1
    table = p.batch.page_table.clone()
    table[1] = -1
    kept = p.kv.k_cache.clone()
    q = by_sequence(p.q, 3)
    out = flash_attn_with_kvcache(
        q, p.kv.k_cache, p.kv.v_cache, k, v, cache_seqlens=before, block_table=table, causal=True
    )
    assert not out[1].any() and out[0].any() and out[2].any()
    changed = (p.kv.k_cache != kept) & ~(p.kv.k_cache.isnan() & kept.isnan())
    assert int(changed.any(-1).any(-1).sum()) == 2


def rows_problem(lens=(5, 3), max_keys=6, q_len=2):
    """A cache without pages: each sequence a row."""
    torch.manual_seed(1)
    k, v = torch.randn(4, max_keys, 2, 32), torch.randn(4, max_keys, 2, 32)
    q = torch.randn(len(lens), q_len, 4, 32)
    return q, k, v, torch.tensor(lens, dtype=I32)


def check_rows(q, k, v, lens, rows, out, lse, causal):
    """Row caches as a paged problem: pages of one row each."""
    from octavo import AttentionSpec

    table = torch.tensor(rows, dtype=I32)[:, None]
    batch = PagedBatch.dense(indptr([q.shape[1]] * len(rows)), table, lens)
    p = Problem(AttentionSpec(4, 2, 32, 32, k.shape[1], causal, FP32), q.flatten(0, 1), PagedKV(k, v), batch)
    assert_matches(p, out.flatten(0, 1), base_2(lse))


@pytest.mark.parametrize("rows", (None, (3, 1)))
def test_kvcache_without_pages(rows):
    q, k, v, lens = rows_problem()
    index = None if rows is None else torch.tensor(rows, dtype=I32)
    out, lse = flash_attn_with_kvcache(
        q, k, v, cache_seqlens=lens, cache_batch_idx=index, causal=True, return_softmax_lse=True
    )
    check_rows(q, k, v, lens, rows or (0, 1), out, lse, True)


@pytest.mark.parametrize("given", (4, None))
def test_one_length_for_all_or_a_full_cache(given):
    q, k, v, _ = rows_problem()
    out, lse = flash_attn_with_kvcache(q, k, v, cache_seqlens=given, return_softmax_lse=True)
    lens = torch.full((2,), given or 6, dtype=I32)
    check_rows(q, k, v, lens, (0, 1), out, lse, False)


def test_flash_attn_func():
    q, k, v, _ = rows_problem()
    out, lse, probs = flash_attn_func(q, k[:2], v[:2], causal=True, return_attn_probs=True)
    assert probs is None
    check_rows(q, k[:2], v[:2], torch.tensor([6, 6], dtype=I32), (0, 1), out, lse, True)
    assert torch.equal(flash_attn_func(q, k[:2], v[:2], window_size=(-1, 0)), out)


@pytest.mark.parametrize("lengths", ("cu_seqlens_k", "seqused_k"))
def test_varlen_over_pages(lengths):
    p = build(VARLEN)
    given = {"cu_seqlens_k": indptr((20, 7, 33, 18)), "seqused_k": p.batch.kv_lens}
    out, lse, _ = flash_attn_varlen_func(
        p.q,
        p.kv.k_cache,
        p.kv.v_cache,
        p.batch.qo_indptr,
        **{lengths: given[lengths]},
        max_seqlen_q=18,
        max_seqlen_k=33,
        causal=True,
        block_table=p.batch.page_table,
        return_attn_probs=True,
    )
    assert_matches(p, out, base_2(lse))


def test_varlen_over_packed_keys():
    p = build(replace(VARLEN, page_size=1, dense=False, scattered=False))
    used = p.batch.page_table[: int(p.batch.kv_indptr[-1])].long()
    k, v = p.kv.k_cache[used, 0], p.kv.v_cache[used, 0]
    arguments = (p.q, k, v, p.batch.qo_indptr, p.batch.kv_indptr, 18, 33, 0.0, None, True)
    out, lse = flash_attn_varlen_func(*arguments, return_softmax_lse=True)
    assert_matches(p, out, base_2(lse))
    assert torch.equal(flash_attn_varlen_func(*arguments), out)
    strided = torch.stack([k, k], -1)[..., 0]
    assert torch.equal(flash_attn_varlen_func(p.q, strided, *arguments[2:]), out)


def test_rows_without_keys():
    q, k, v, _ = rows_problem(q_len=4)
    lens = torch.tensor([2, 0], dtype=I32)
    out, lse = flash_attn_with_kvcache(q, k, v, cache_seqlens=lens, causal=True, return_softmax_lse=True)
    assert not out[0, :2].any() and not out[1].any() and (lse[1] == -math.inf).all()
    check_rows(q, k, v, lens, (0, 1), out, lse, True)


REFUSED = {
    "rotary_cos": {"rotary_cos": torch.ones(8, 8)},
    "cache_leftpad": {"cache_leftpad": torch.zeros(2, dtype=I32)},
    "qv": {"qv": torch.ones(2)},
    "k_descale": {"k_descale": torch.ones(2, 2)},
    "attention_chunk": {"attention_chunk": 4},
    "alibi_slopes_per_sequence": {"alibi_slopes": torch.ones(2, 4)},
    "cache_batch_idx": {"cache_batch_idx": torch.zeros(2, dtype=I32), "block_table": torch.zeros(2, 1, dtype=I32)},
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_not_carried_is_named(words):
    q, k, v, lens = rows_problem()
    with pytest.raises(NotImplementedError, match=words):
        flash_attn_with_kvcache(q, k, v, cache_seqlens=lens, **REFUSED[words])


def test_wrong_arguments():
    q, k, v, lens = rows_problem()
    with pytest.raises(ValueError, match="k and v"):
        flash_attn_with_kvcache(q, k, v, k[:2, :1], cache_seqlens=lens)
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        flash_attn_with_kvcache(q[0], k, v, cache_seqlens=lens)
    with pytest.raises(ValueError, match="cu_seqlens_k"):
        flash_attn_varlen_func(q[0], k[0], v[0], indptr([2]))
    with pytest.raises(ValueError, match="seqused_k"):
        flash_attn_varlen_func(q[0], k, v, indptr([2]), block_table=torch.zeros(1, 1, dtype=I32))
    with pytest.raises(NotImplementedError, match="dropout_p"):
        flash_attn_varlen_func(q[0], k[0], v[0], indptr([2]), indptr([6]), dropout_p=0.1)
