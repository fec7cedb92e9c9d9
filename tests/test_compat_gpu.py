"""What only a GPU shows of compat: wrappers that wait for nothing, and graphs that replay later plans."""

from dataclasses import replace

import pytest
import torch
from inputs import BAD_PAGE, BF16, Case, build
from tolerance import assert_matches

import octavo.compat.flashinfer as fi
from octavo import PagedKV
from octavo.compat.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

pytestmark = pytest.mark.gpu

PREFILL = Case("prefill", (130, 1, 17, 40), (200, 70, 333, 40), (8, 2), (128, 128), page_size=16, padding=0)
DECODE = replace(PREFILL, qo_lens=(1, 1, 1, 1), name="decode")
WAITS = ("error", "default")


def on_gpu(case):
    p = build(case, "cuda")
    ids = torch.where(p.batch.page_table == BAD_PAGE, 0, p.batch.page_table)
    b = p.batch
    return p, (b.qo_indptr, b.kv_indptr, ids, b.last_page_len)


class Waits:
    """No synchronisation inside."""

    def __enter__(self):
        torch.cuda.set_sync_debug_mode("error")

    def __exit__(self, *error):
        torch.cuda.set_sync_debug_mode("default")


def workspace():
    return torch.empty(16, dtype=torch.uint8, device="cuda")


def shapes(p):
    return p.spec.num_qo_heads, p.spec.num_kv_heads, p.spec.head_dim, p.spec.page_size


@pytest.mark.parametrize("tables_on", ("cuda", "cpu"))
def test_prefill_waits_for_nothing(tables_on):
    p, tables = on_gpu(PREFILL)
    tables = [x.to(tables_on) for x in tables]
    wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(workspace())
    cache = (p.kv.k_cache, p.kv.v_cache)
    scale = torch.tensor(0.5, device="cuda")
    for i in range(2):  # the first call compiles
        with Waits() if i else torch.no_grad():
            wrapper.plan(*tables, *shapes(p), causal=True, q_data_type=BF16)
            out, lse = wrapper.run(p.q, cache, return_lse=True)
            scaled = wrapper.run(p.q, cache, q_scale=scale, k_scale=2.0)
    assert_matches(p, out, lse)
    assert torch.equal(scaled, out)


def test_decode_append_and_merge_wait_for_nothing():
    p, (_, kv_indptr, ids, last) = on_gpu(DECODE)
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(workspace())
    cache = (p.kv.k_cache, p.kv.v_cache)
    k, v = (torch.randn(4, 2, 128, device="cuda", dtype=BF16) for _ in "kv")
    for i in range(2):
        with Waits() if i else torch.no_grad():
            lengths = fi.get_seq_lens(kv_indptr, last, 16)
            where = fi.get_batch_indices_positions(p.batch.qo_indptr, lengths, 4)
            fi.append_paged_kv_cache(k, v, *where, cache, ids, kv_indptr, last)
            wrapper.plan(kv_indptr, ids, last, *shapes(p), q_data_type=BF16)
            out, lse = wrapper.run(p.q, cache, return_lse=True)
            fi.merge_state(out, lse, out, lse)
    assert_matches(p, out, lse)


def test_flash_attn_waits_for_nothing():
    p = build(replace(DECODE, dense=True), "cuda")
    k, v = (torch.randn(4, 1, 2, 128, device="cuda", dtype=BF16) for _ in "kv")
    ragged, tables = on_gpu(replace(PREFILL, page_size=1, scattered=False))
    flat = [x[tables[2][: sum(PREFILL.kv_lens)].long(), 0] for x in (ragged.kv.k_cache, ragged.kv.v_cache)]
    for i in range(2):
        with Waits() if i else torch.no_grad():
            out = flash_attn_with_kvcache(
                p.q[:, None],
                p.kv.k_cache,
                p.kv.v_cache,
                k,
                v,
                cache_seqlens=p.batch.kv_lens - 1,
                block_table=p.batch.page_table,
                causal=True,
            )
            varlen = flash_attn_varlen_func(ragged.q, *flat, tables[0], tables[1], 130, 333, causal=True)
    exact, _ = p.expected()
    torch.testing.assert_close(out[:, 0].cpu().double(), exact, rtol=2e-2, atol=1e-2)
    exact, _ = ragged.expected()
    torch.testing.assert_close(varlen.cpu().double(), exact, rtol=2e-2, atol=1e-2)


def replayed(run):
    """(graph, what run returned under capture), after a warm-up."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = run()
    return graph, made


@pytest.mark.parametrize("tables_on", ("cuda", "cpu"))
def test_a_prefill_graph_replays_later_plans(tables_on):
    p, tables = on_gpu(PREFILL)
    buffers = [torch.zeros(5, dtype=torch.int32, device="cuda") for _ in "ab"]
    buffers += [torch.zeros(512, dtype=torch.int32, device="cuda"), torch.zeros(4, dtype=torch.int32, device="cuda")]
    wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(workspace(), "NHD", True, *buffers)
    q = p.q.clone()
    k, v = (torch.zeros(64, *x.shape[1:], device="cuda", dtype=BF16) for x in (p.kv.k_cache, p.kv.v_cache))

    def plan(problem, tables):
        for cache, own in ((k, problem.kv.k_cache), (v, problem.kv.v_cache)):
            cache[: len(own)] = own.nan_to_num(0.5)
        wrapper.plan(*(x.to(tables_on) for x in tables), *shapes(problem), causal=True, q_data_type=BF16)

    plan(p, tables)
    graph, (out, lse) = replayed(lambda: wrapper.run(q, (k, v), return_lse=True))
    for case in (PREFILL, replace(PREFILL, qo_lens=(60, 20, 100, 8), kv_lens=(90, 33, 100, 250), seed=5)):
        problem, tables = on_gpu(case)
        plan(problem, tables)
        q.zero_()
        q[: len(problem.q)] = problem.q
        graph.replay()
        assert_matches(replace(problem, q=q, kv=PagedKV(k, v)), out, lse)


def test_a_decode_graph_replays_later_plans():
    p, (_, *tables) = on_gpu(DECODE)
    room = [torch.zeros(n, dtype=torch.int32, device="cuda") for n in (5, 512, 4)]
    wrapper = fi.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(), *room)
    k, v = (torch.zeros(64, *x.shape[1:], device="cuda", dtype=BF16) for x in (p.kv.k_cache, p.kv.v_cache))
    q = p.q.clone()
    wrapper.plan(*tables, *shapes(p), q_data_type=BF16)
    graph, (out, lse) = replayed(lambda: wrapper.run(q, (k, v), return_lse=True))
    for case in (DECODE, replace(DECODE, kv_lens=(1, 300, 16, 33), seed=6)):
        problem, (_, *tables) = on_gpu(case)
        for cache, own in ((k, problem.kv.k_cache), (v, problem.kv.v_cache)):
            cache[: len(own)] = own.nan_to_num(0.5)
        wrapper.plan(*tables, *shapes(problem), q_data_type=BF16)
        q.copy_(problem.q)
        graph.replay()
        assert_matches(replace(problem, kv=PagedKV(k, v)), out, lse)
