"""Variants through both peers' arguments, each sequence against float32 PyTorch under FlashInfer's own definition."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from inputs import FP16, FP32, I32, Case, Problem, build

import octavo.compat.flashinfer as fi
from octavo.compat import flashinfer_reference as reference
from octavo.compat.arguments import alibi_slopes
from octavo.compat.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from octavo.reference import page_ids, sequence_lengths

WORKSPACE = torch.empty(0)
MIXED = Case("mixed", (3, 1, 18), (20, 33, 18), page_size=4, dtype=FP32, padding=0)
DECODE = replace(MIXED, qo_lens=(1, 1, 1))
LOG2_E = math.log2(math.e)


def sequences(p: Problem):
    """(slice of q's rows, k, v) of each sequence."""
    starts = p.batch.qo_indptr.tolist()
    _, kv_lens = sequence_lengths(p.batch, p.spec.page_size)
    for i, ((a, b), n) in enumerate(zip(pairwise(starts), kv_lens, strict=True)):
        ids = page_ids(p.batch, i, -(-n // p.spec.page_size))
        yield slice(a, b), p.kv.k_cache[ids].flatten(0, 1)[:n], p.kv.v_cache[ids].flatten(0, 1)[:n]


def close(p: Problem, out, lse, masks=None, lse_shift=None, **options):
    """Every sequence against the reference under `options`."""
    for i, (rows, k, v) in enumerate(sequences(p)):
        given = options | ({} if masks is None else {"custom_mask": masks[i]})
        exact, exact_lse = reference.single_prefill_with_kv_cache(p.q[rows], k, v, return_lse=True, **given)
        if lse_shift is not None:
            exact_lse = exact_lse + lse_shift(exact.shape[0], k.shape[0])
        torch.testing.assert_close(out[rows], exact, rtol=2e-5, atol=2e-6)
        torch.testing.assert_close(lse[rows], exact_lse, rtol=2e-5, atol=2e-5)


def planned(p: Problem, cls=fi.BatchPrefillWithPagedKVCacheWrapper, **options):
    b, heads = p.batch, (p.spec.num_qo_heads, p.spec.num_kv_heads, p.spec.head_dim, p.spec.page_size)
    wrapper = cls(WORKSPACE)
    tables = (b.kv_indptr, b.page_table, b.last_page_len)
    if cls is fi.BatchPrefillWithPagedKVCacheWrapper:
        tables = (b.qo_indptr, *tables)
    wrapper.plan(*tables, *heads, q_data_type=p.q.dtype, **options)
    return wrapper


def cache_of(p: Problem):
    return p.kv.k_cache, p.kv.v_cache


VARIANTS = {
    "window": {"causal": True, "window_left": 5},
    "own key alone": {"causal": True, "window_left": 0},
    "window, not causal": {"causal": False, "window_left": 5},
    "soft-cap": {"causal": True, "logits_soft_cap": 2.0},
    "window and soft-cap": {"causal": True, "window_left": 7, "logits_soft_cap": 1.0},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_prefill(name):
    p = build(MIXED)
    wrapper = planned(p, **VARIANTS[name])
    close(p, *wrapper.run(p.q, cache_of(p), return_lse=True), **VARIANTS[name])


@pytest.mark.parametrize("name", ("window", "soft-cap", "window and soft-cap"))
def test_decode(name):
    p = build(DECODE)
    options = {key: value for key, value in VARIANTS[name].items() if key != "causal"}
    wrapper = planned(p, fi.BatchDecodeWithPagedKVCacheWrapper, **options)
    close(p, *wrapper.run(p.q, cache_of(p), return_lse=True), **options)
    for rows, k, v in sequences(p):
        single = fi.single_decode_with_kv_cache(p.q[rows][0], k, v, **options)
        exact = reference.single_decode_with_kv_cache(p.q[rows][0], k, v, **options)
        torch.testing.assert_close(single, exact, rtol=2e-5, atol=2e-6)


def test_window_of_one_run_and_of_forward():
    p = build(MIXED)
    wrapper = planned(p, causal=True)
    for window in (4, -1, 2):
        close(p, *wrapper.run(p.q, cache_of(p), return_lse=True, window_left=window), causal=True, window_left=window)
    out = wrapper.forward(p.q, cache_of(p), True, window_left=3, logits_soft_cap=2.0)
    _, lse = wrapper.run(p.q, cache_of(p), return_lse=True)
    close(p, out, lse, causal=True, window_left=3, logits_soft_cap=2.0)


@pytest.mark.parametrize("causal", (True, False))
def test_alibi(causal):
    p = build(MIXED)
    wrapper = planned(p, causal=causal, pos_encoding_mode="ALIBI")
    slopes = alibi_slopes(4, torch.device("cpu"))

    def shift(q_len, kv_len):
        return -slopes * (kv_len - q_len) * LOG2_E

    options = {"causal": causal, "pos_encoding_mode": "ALIBI"}
    close(p, *wrapper.run(p.q, cache_of(p), return_lse=True), lse_shift=shift, **options)


def masks_of(p: Problem):
    """A random mask a sequence; the first row of each sees nothing."""
    torch.manual_seed(0)
    q_lens, kv_lens = sequence_lengths(p.batch, p.spec.page_size)
    masks = [torch.rand(q, n) < 0.6 for q, n in zip(q_lens, kv_lens, strict=True)]
    for mask in masks:
        mask[0] = False
    return masks


@pytest.mark.parametrize("packed", (False, True))
@pytest.mark.parametrize("extra", ({}, {"window_left": 6}), ids=str)
def test_custom_masks(packed, extra):
    p = build(MIXED)
    masks = masks_of(p)
    flat = torch.cat([mask.flatten() for mask in masks])
    given = {"custom_mask": flat}
    if packed:
        edges = torch.tensor([0, *(mask.numel() for mask in masks)]).cumsum(0)
        given = {"packed_custom_mask": reference.segment_packbits(flat, edges, "little")[0]}
    wrapper = planned(p, causal=True, **given, **extra)
    close(p, *wrapper.run(p.q, cache_of(p), return_lse=True), masks=masks, **extra)


def test_mask_of_one_sequence():
    p = build(replace(MIXED, qo_lens=(7,), kv_lens=(9,)))
    mask = masks_of(p)[0]
    (_, k, v), *_ = sequences(p)
    for given in ({"custom_mask": mask}, {"packed_custom_mask": reference.packbits(mask, "little")}):
        close(p, *fi.single_prefill_with_kv_cache(p.q, k, v, return_lse=True, **given), masks=[mask])


def test_masks_of_ragged_keys():
    p = build(MIXED)
    masks = masks_of(p)
    k, v = (torch.cat([x[i] for x in sequences(p)]) for i in (1, 2))
    lens = torch.tensor([0, *sequence_lengths(p.batch, 4)[1]], dtype=I32).cumsum(0, dtype=I32)
    wrapper = fi.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    flat = torch.cat([mask.flatten() for mask in masks])
    wrapper.plan(p.batch.qo_indptr, lens, 4, 2, 64, custom_mask=flat, q_data_type=FP32)
    close(p, *wrapper.run(p.q, k, v, return_lse=True), masks=masks)


def with_sinks(out, lse, sinks):
    """What sinks, logits of no value, make of an attention without: their weight is lost."""
    total = torch.logaddexp(lse / LOG2_E, sinks.expand_as(lse))
    return out * torch.exp(lse / LOG2_E - total)[..., None], total * LOG2_E


def test_sinks():
    p = build(MIXED)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    plain = planned(p, causal=True).run(p.q, cache_of(p), return_lse=True)
    exact = with_sinks(*plain, sinks)
    out, lse = planned(p, causal=True).run(p.q, cache_of(p), return_lse=True, sinks=sinks)
    torch.testing.assert_close(out, exact[0], rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(lse, exact[1], rtol=2e-5, atol=2e-5)
    b, heads = p.batch, (4, 2, 64, 4)
    wrapper = fi.BatchAttentionWithAttentionSinkWrapper(WORKSPACE, q_data_type=FP32, head_dim_qk=64, head_dim_vo=64)
    tables = (b.qo_indptr, b.kv_indptr, b.page_table, b.last_page_len)
    wrapper.plan(*tables, *heads, causal=True, q_data_type=FP32)
    torch.testing.assert_close(wrapper.run(p.q, cache_of(p), sinks, 0.125), out)


@pytest.mark.parametrize("kv_dtype", (torch.float8_e4m3fn, torch.float8_e5m2), ids=str)
def test_fp8_caches(kv_dtype):
    p = build(replace(MIXED, dtype=FP16))
    cache = tuple(x.nan_to_num(0.5).to(kv_dtype) for x in cache_of(p))
    wrapper = planned(p, causal=True, kv_data_type=kv_dtype)
    out, lse = wrapper.run(p.q, cache, return_lse=True, k_scale=0.5, v_scale=2.0)
    wide = [x.float() for x in cache]
    for i, (rows, _, _) in enumerate(sequences(p)):
        n = sequence_lengths(p.batch, 4)[1][i]
        ids = page_ids(p.batch, i, -(-n // 4))
        k, v = (x[ids].flatten(0, 1)[:n] for x in wide)
        options = {"causal": True, "return_lse": True, "k_scale": 0.5, "v_scale": 2.0}
        exact, exact_lse = reference.single_prefill_with_kv_cache(p.q[rows].float(), k, v, **options)
        torch.testing.assert_close(out[rows].float(), exact, rtol=4e-3, atol=4e-3)
        torch.testing.assert_close(lse[rows], exact_lse, rtol=1e-3, atol=1e-3)


# FlashAttention


def packed_keys(p: Problem):
    k, v = (torch.cat([x[i] for x in sequences(p)]) for i in (1, 2))
    lens = torch.tensor([0, *sequence_lengths(p.batch, p.spec.page_size)[1]], dtype=I32)
    return k, v, p.batch.qo_indptr, lens.cumsum(0, dtype=I32)


def banded(p: Problem, left: int, right: int):
    masks = []
    for rows, k, _ in sequences(p):
        n = rows.stop - rows.start
        position = torch.arange(n)[:, None] + k.shape[0] - n
        key = torch.arange(k.shape[0])[None]
        masks.append((key >= position - left) & (key <= position + right))
    return masks


@pytest.mark.parametrize("window", ((5, 3), (5, 0), (0, 2)), ids=str)
def test_flash_attn_windows(window):
    p = build(MIXED)
    k, v, qo, lens = packed_keys(p)
    out, lse, _ = flash_attn_varlen_func(p.q, k, v, qo, lens, 18, 33, window_size=window, return_attn_probs=True)
    close(p, out, lse.T * LOG2_E, masks=banded(p, *window))


def test_flash_attn_causal_windows_and_soft_cap():
    p = build(MIXED)
    k, v, qo, lens = packed_keys(p)
    options = {"causal": True, "window_size": (5, 5), "softcap": 2.0, "return_softmax_lse": True}
    out, lse = flash_attn_varlen_func(p.q, k, v, qo, lens, **options)
    close(p, out, lse.T * LOG2_E, causal=True, window_left=5, logits_soft_cap=2.0)


def test_flash_attn_alibi_and_sink():
    p = build(replace(MIXED, dense=True))
    slopes = alibi_slopes(4, torch.device("cpu"))
    tables = {"cache_seqlens": p.batch.kv_lens, "block_table": p.batch.page_table, "cu_seqlens_q": p.batch.qo_indptr}
    options = tables | {"causal": True, "return_softmax_lse": True}
    out, lse = flash_attn_with_kvcache(p.q, *cache_of(p), alibi_slopes=slopes, **options)

    def shift(q_len, kv_len):
        return -slopes * (kv_len - q_len) * LOG2_E

    close(p, out, lse.T * LOG2_E, lse_shift=shift, causal=True, pos_encoding_mode="ALIBI")
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    plain = flash_attn_with_kvcache(p.q, *cache_of(p), **options)
    exact = with_sinks(plain[0], plain[1].T * LOG2_E, sinks)
    out, lse = flash_attn_with_kvcache(p.q, *cache_of(p), learnable_sink=sinks.to(torch.bfloat16), **options)
    torch.testing.assert_close(out, exact[0], rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(lse.T * LOG2_E, exact[1], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("packed", (False, True))
def test_masks_of_graphs(packed):
    """Into the fixed buffers, for a second plan too."""
    buffers = [torch.zeros(n, dtype=I32) for n in (4, 4, 64, 3)]
    bits, edges = torch.zeros(256, dtype=torch.uint8), torch.zeros(4, dtype=I32)
    wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, "NHD", True, *buffers, bits, edges)
    for case in (MIXED, replace(MIXED, qo_lens=(2, 5, 1), seed=7)):
        p = build(case)
        masks = masks_of(p)
        flat = torch.cat([mask.flatten() for mask in masks])
        offsets = torch.tensor([0, *(mask.numel() for mask in masks)]).cumsum(0)
        given = {"custom_mask": flat}
        if packed:
            given = {"packed_custom_mask": reference.segment_packbits(flat, offsets, "little")[0]}
        b = p.batch
        tables = (b.qo_indptr, b.kv_indptr, b.page_table.clamp(max=50), b.last_page_len)
        wrapper.plan(*tables, 4, 2, 64, 4, q_data_type=FP32, **given)
        close(p, *wrapper.run(p.q, cache_of(p), return_lse=True), masks=masks)
