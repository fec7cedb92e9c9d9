"""compat.flashinfer against the oracle: FlashInfer's arguments, layouts, defaults, buffers and refusals."""

import inspect
import math
from dataclasses import replace

import pytest
import torch
from inputs import BAD_PAGE, FP16, FP32, I32, Case, Problem, build, indptr, new_tokens, write_in_loops
from tolerance import assert_matches

import octavo.compat.flashinfer as fi
from octavo import AttentionSpec, PagedBatch, PagedKV
from octavo.compat.arguments import spec_for
from octavo.compat.flashinfer.masks import byte_offsets, pack
from octavo.compat.flashinfer_reference import segment_packbits
from octavo.reference import merge_reference, reference

WORKSPACE = torch.empty(0)
MIXED = Case("mixed", (3, 0, 1, 18), (20, 7, 33, 18), page_size=4, dtype=FP32, padding=0)
DECODE = Case("decode", (1, 1, 1), (20, 7, 33), page_size=4, dtype=FP32, padding=0)


def heads(p: Problem) -> tuple[int, int, int]:
    return p.spec.num_qo_heads, p.spec.num_kv_heads, p.spec.head_dim


def table(p: Problem) -> tuple[torch.Tensor, ...]:
    b = p.batch
    return b.kv_indptr, b.page_table, b.last_page_len


def prefill(p: Problem, kv_layout="NHD", **options):
    wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, kv_layout)
    options = {"causal": p.spec.causal, "q_data_type": p.spec.dtype} | options
    wrapper.plan(p.batch.qo_indptr, *table(p), *heads(p), p.spec.page_size, head_dim_vo=p.spec.v_dim, **options)
    return wrapper


def decode(p: Problem, **options):
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(*table(p), *heads(p), p.spec.page_size, q_data_type=p.spec.dtype, **options)
    return wrapper


def cache_of(p: Problem, form: str):
    k, v = p.kv.k_cache, p.kv.v_cache
    hnd = [x.transpose(1, 2).contiguous() for x in (k, v)]
    forms = {
        "tuple NHD": lambda: (k, v),
        "combined NHD": lambda: torch.stack([k, v], 1),
        "tuple HND": lambda: tuple(hnd),
        "combined HND": lambda: torch.stack(hnd, 1),
    }
    return forms[form]()


# Prefill


@pytest.mark.parametrize("form", ("tuple NHD", "combined NHD", "tuple HND", "combined HND"))
@pytest.mark.parametrize("causal", (True, False))
def test_paged_prefill(form, causal):
    p = build(replace(MIXED, causal=causal))
    wrapper = prefill(p, kv_layout=form.split()[1])
    out, lse = wrapper.run(p.q, cache_of(p, form), return_lse=True)
    assert_matches(p, out, lse)
    alone = wrapper.run(p.q, cache_of(p, form))
    assert isinstance(alone, torch.Tensor) and torch.equal(alone, out)


def test_prefill_defaults_are_not_causal_and_float16():
    p = build(replace(MIXED, causal=False, dtype=FP16))
    wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(p.batch.qo_indptr, *table(p), *heads(p), 4)
    assert_matches(p, *wrapper.run_return_lse(p.q, (p.kv.k_cache, p.kv.v_cache)))


def test_prefill_value_dim_scale_and_buffers():
    p = replace(build(replace(MIXED, dims=(64, 32))), sm_scale=0.3)
    wrapper = prefill(p, sm_scale=0.3)
    out, lse = torch.empty(len(p.q), 4, 32), torch.empty(len(p.q), 4)
    got = wrapper.run(p.q, (p.kv.k_cache, p.kv.v_cache), out=out, lse=lse, return_lse=True)
    assert got[0] is out and got[1] is lse
    assert_matches(p, out, lse)
    again = torch.empty_like(out)
    assert wrapper.run(p.q, (p.kv.k_cache, p.kv.v_cache), out=again) is again and torch.equal(again, out)


@pytest.mark.parametrize("as_tensor", (False, True))
def test_scales_of_q_k_and_v(as_tensor):
    p = build(MIXED)
    scales = {"q_scale": 0.5, "k_scale": 0.75, "v_scale": 2.0}
    if as_tensor:
        scales = {name: torch.tensor([value]) for name, value in scales.items()}
    out, lse = prefill(p).run(p.q, (p.kv.k_cache, p.kv.v_cache), return_lse=True, **scales)
    assert_matches(replace(p, sm_scale=0.375 / 8), out / 2, lse)


def test_a_later_plan_replaces_the_first_and_layers_share_one():
    p, other = build(MIXED), build(replace(MIXED, qo_lens=(1, 2, 2, 1), seed=3))
    wrapper = prefill(p)
    for _ in range(2):
        assert_matches(p, *wrapper.run(p.q, (p.kv.k_cache, p.kv.v_cache), return_lse=True))
    wrapper.plan(other.batch.qo_indptr, *table(other), *heads(other), 4, causal=True, q_data_type=FP32)
    assert_matches(other, *wrapper.run(other.q, (other.kv.k_cache, other.kv.v_cache), return_lse=True))


def test_deprecated_spellings():
    p = build(MIXED)
    wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.begin_forward(p.batch.qo_indptr, *table(p), *heads(p), 4, q_data_type=FP32)
    cache = (p.kv.k_cache, p.kv.v_cache)
    assert_matches(replace(p, sm_scale=0.2), *wrapper.forward_return_lse(p.q, cache, True, sm_scale=0.2))
    free = replace(p, spec=replace(p.spec, causal=False))
    out, _ = free.expected()
    torch.testing.assert_close(wrapper.forward(p.q, cache).double(), out, rtol=1e-5, atol=1e-6)
    wrapper.end_forward()


def test_fixed_buffers_of_a_graph_keep_their_place():
    p = build(MIXED)
    buffers = (torch.zeros(5, dtype=I32), torch.zeros(5, dtype=I32), torch.full((64,), 0, dtype=I32))
    last = torch.zeros(4, dtype=I32)
    wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, "NHD", True, *buffers, last)
    assert wrapper.is_cuda_graph_enabled
    for problem in (p, build(replace(MIXED, qo_lens=(2, 1, 1, 4), seed=2))):
        ids = problem.batch.page_table
        ids = torch.where(ids == BAD_PAGE, 0, ids)
        indptr_, _, last_page_len = table(problem)
        wrapper.plan(problem.batch.qo_indptr, indptr_, ids, last_page_len, *heads(p), 4, causal=True, q_data_type=FP32)
        assert_matches(problem, *wrapper.run(problem.q, (problem.kv.k_cache, problem.kv.v_cache), return_lse=True))
        assert torch.equal(buffers[0], problem.batch.qo_indptr) and torch.equal(last, last_page_len)
    with pytest.raises(ValueError, match="qo_indptr_buf"):
        fi.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, "NHD", True)


def test_workspace_needs_nothing():
    p = build(MIXED)
    wrapper = prefill(p)
    assert wrapper.workspace_size(p.batch.qo_indptr, *table(p), *heads(p), 4) == (0, 0)
    wrapper.reset_workspace_buffer(WORKSPACE, WORKSPACE)
    with pytest.raises(RuntimeError, match="plan"):
        fi.BatchPrefillWithPagedKVCacheWrapper(None).run(p.q, (p.kv.k_cache, p.kv.v_cache))


def ragged_problem(**changes) -> Problem:
    """Keys of the sequences one after another, as k and v of a ragged call have them."""
    case = replace(MIXED, page_size=1, scattered=False, **changes)
    return build(case)


@pytest.mark.parametrize("kv_layout", ("NHD", "HND"))
def test_ragged_prefill(kv_layout):
    p = ragged_problem()
    ids = p.batch.page_table[: int(p.batch.kv_indptr[-1])].long()
    k, v = p.kv.k_cache[ids, 0], p.kv.v_cache[ids, 0]
    if kv_layout == "HND":
        k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
    wrapper = fi.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE, kv_layout)
    wrapper.plan(p.batch.qo_indptr, p.batch.kv_indptr, *heads(p), causal=True, q_data_type=FP32)
    out, lse = wrapper.run(p.q, k, v, return_lse=True)
    assert_matches(p, out, lse)
    torch.testing.assert_close(wrapper.forward(p.q, k, v, True), out)
    assert torch.equal(wrapper.run_return_lse(p.q, k, v)[1], lse)


# Decode


@pytest.mark.parametrize("form", ("tuple NHD", "combined NHD"))
def test_decode(form):
    p = build(DECODE)
    wrapper = decode(p)
    out, lse = wrapper.run(p.q, cache_of(p, form), return_lse=True)
    assert_matches(p, out, lse)
    assert torch.equal(wrapper.run(p.q, cache_of(p, form), q_scale=1.0), out)


def test_decode_positional_options_and_legacy_data_type():
    p = replace(build(replace(DECODE, dtype=FP16)), sm_scale=0.25)
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, use_tensor_cores=True)
    assert wrapper.use_tensor_cores
    plain = ("NONE", -1, 0.0, None, None, None, "float16", 0.25)
    wrapper.begin_forward(*table(p), *heads(p), 4, *plain)
    assert_matches(p, *wrapper.forward_return_lse(p.q, (p.kv.k_cache, p.kv.v_cache), sm_scale=0.25))
    with pytest.raises(TypeError, match="pos_encoding_mode"):
        wrapper.plan(*table(p), *heads(p), 4, "NONE", pos_encoding_mode="NONE")


def test_decode_of_several_queries_a_request():
    p = build(replace(DECODE, qo_lens=(3, 3, 3)))
    wrapper = decode(p, q_len_per_req=3)
    assert_matches(p, *wrapper.run(p.q, (p.kv.k_cache, p.kv.v_cache), return_lse=True))
    with pytest.raises(ValueError, match="q_len_per_req"):
        wrapper.run(p.q[:3], (p.kv.k_cache, p.kv.v_cache))


def test_cuda_graph_decode():
    p = build(DECODE)
    buffers = (torch.zeros(4, dtype=I32), torch.zeros(64, dtype=I32), torch.zeros(3, dtype=I32))
    wrapper = fi.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(WORKSPACE, *buffers)
    for problem in (p, build(replace(DECODE, kv_lens=(5, 6, 7), seed=4))):
        ids = torch.where(problem.batch.page_table == BAD_PAGE, 0, problem.batch.page_table)
        kv_indptr, _, last = table(problem)
        fi.fast_decode_plan(wrapper, kv_indptr, ids, last, *heads(p), 4, q_data_type=FP32)
        assert_matches(problem, *wrapper.run(problem.q, (problem.kv.k_cache, problem.kv.v_cache), return_lse=True))
        assert torch.equal(buffers[0], kv_indptr)
    with pytest.raises(ValueError, match="frozen"):
        wrapper.plan(kv_indptr[:3], ids, last[:2], *heads(p), 4, q_data_type=FP32)


# One sequence


@pytest.mark.parametrize("kv_layout", ("NHD", "HND"))
def test_single_calls(kv_layout):
    p = ragged_problem(qo_lens=(5,), kv_lens=(9,))
    ids = p.batch.page_table[:9].long()
    k, v = p.kv.k_cache[ids, 0], p.kv.v_cache[ids, 0]
    if kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    out, lse = fi.single_prefill_with_kv_cache(p.q, k, v, causal=True, kv_layout=kv_layout, return_lse=True)
    assert_matches(p, out, lse)
    options = {"causal": True, "kv_layout": kv_layout}
    assert torch.equal(fi.single_prefill_with_kv_cache_return_lse(p.q, k, v, **options)[1], lse)
    last, last_lse = fi.single_decode_with_kv_cache(p.q[4], k, v, kv_layout, return_lse=True)
    assert last.shape == (4, 64) and last_lse.shape == (4,)
    torch.testing.assert_close(last, out[4], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(last_lse, lse[4], rtol=1e-6, atol=1e-6)
    doubled = fi.single_decode_with_kv_cache(p.q[4], k, v, kv_layout, q_scale=2.0, k_scale=0.5, v_scale=3.0)
    torch.testing.assert_close(doubled, 3 * last, rtol=1e-5, atol=1e-6)


# BatchAttention, cascades


def test_batch_attention():
    p = build(MIXED)
    wrapper = fi.BatchAttention(device="cpu")
    lengths = fi.get_seq_lens(p.batch.kv_indptr, p.batch.last_page_len, 4)
    assert lengths.tolist() == [20, 7, 33, 18]
    dims = (64, 64, 4)
    wrapper.plan(
        p.batch.qo_indptr, p.batch.kv_indptr, p.batch.page_table, lengths, 4, 2, *dims, True, q_data_type=FP32,
        kv_data_type=FP32,
    )  # fmt: skip
    assert_matches(p, *wrapper.run(p.q, (p.kv.k_cache, p.kv.v_cache)))
    with pytest.raises(ValueError, match="logits_soft_cap"):
        wrapper.run(p.q, (p.kv.k_cache, p.kv.v_cache), logits_soft_cap=30.0)


def cascade_problem(q_len: int) -> tuple[Problem, list[tuple[torch.Tensor, ...]]]:
    """Three sequences over a prefix of two pages of 4 keys: (flat problem, tables of the two levels)."""
    flat = build(Case("flat", (q_len,) * 3, (14, 12, 9), page_size=4, dtype=FP32, padding=0))
    ids = flat.batch.page_table[: int(flat.batch.kv_indptr[-1])]
    own = list(ids.split([4, 3, 3]))
    shared = own[0][:2]
    whole = PagedBatch.csr(
        flat.batch.qo_indptr,
        flat.batch.kv_indptr,
        torch.cat([torch.cat([shared, x[2:]]) for x in own]),
        flat.batch.last_page_len,
    )
    prefix = (indptr([3 * q_len]), indptr([2]), shared, torch.tensor([4], dtype=I32))
    suffix = (flat.batch.qo_indptr, indptr([2, 1, 1]), torch.cat([x[2:] for x in own]), whole.last_page_len)
    kv = PagedKV(*(x.nan_to_num(0.5) for x in (flat.kv.k_cache, flat.kv.v_cache)))
    return replace(flat, batch=whole, kv=kv), [prefix, suffix]


@pytest.mark.parametrize("q_len", (1, 2))
def test_multi_level_cascade(q_len):
    p, levels = cascade_problem(q_len)
    wrapper = fi.MultiLevelCascadeAttentionWrapper(2, WORKSPACE)
    arrays = [list(x) for x in zip(*levels, strict=True)]
    wrapper.plan(*arrays, *heads(p), 4, causal=True, q_data_type=FP32)
    out = wrapper.run(p.q, (p.kv.k_cache, p.kv.v_cache))
    torch.testing.assert_close(out.double(), p.expected()[0], rtol=1e-5, atol=1e-6)
    with pytest.raises(NotImplementedError, match="window_left"):
        wrapper.plan(*arrays, *heads(p), 4, window_left=3)
    buffers = [[x.clone() for x in array] for array in arrays]
    graphed = fi.MultiLevelCascadeAttentionWrapper(2, WORKSPACE, "NHD", True, *buffers)
    graphed.begin_forward(*arrays, *heads(p), 4, True, q_data_type=FP32)
    assert torch.equal(graphed.forward(p.q, (p.kv.k_cache, p.kv.v_cache)), out)


def test_shared_prefix_wrappers():
    p, levels = cascade_problem(2)
    shared = levels[0][2].long()
    k, v = (x[shared].flatten(0, 1) for x in (p.kv.k_cache, p.kv.v_cache))
    wrapper = fi.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(WORKSPACE)
    half = [x.half() for x in (p.q, k, v, p.kv.k_cache, p.kv.v_cache)]
    wrapper.begin_forward(*levels[1], *heads(p), 4)
    out = wrapper.forward(*half[:3], tuple(half[3:]), causal=True)
    torch.testing.assert_close(out.double(), p.expected()[0], rtol=1e-2, atol=2e-3)
    single, tables = cascade_problem(1)
    k, v = (x[tables[0][2].long()].flatten(0, 1) for x in (single.kv.k_cache, single.kv.v_cache))
    decoder = fi.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(WORKSPACE)
    decoder.begin_forward(*tables[1][1:], *heads(single), 4, FP32)
    out = decoder.forward(single.q, k, v, (single.kv.k_cache, single.kv.v_cache))
    torch.testing.assert_close(out.double(), single.expected()[0], rtol=1e-5, atol=1e-6)


def states(count):
    torch.manual_seed(0)
    return torch.randn(5, count, 3, 32), torch.randn(5, count, 3)


def test_merges():
    v, s = states(3)
    s[2] = -math.inf
    exact = merge_reference(v.unbind(1), s.unbind(1))
    torch.testing.assert_close(fi.merge_states(v, s)[0].double(), exact[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(fi.merge_states(v, s)[1].double(), exact[1], rtol=1e-5, atol=1e-6)
    pair = merge_reference(v.unbind(1)[:2], s.unbind(1)[:2])
    out, lse = fi.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1])
    torch.testing.assert_close(out.double(), pair[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double(), pair[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mask", (None, torch.tensor([True, False, True, True, False])))
def test_merge_in_place(mask):
    v, s = states(2)
    out, lse = v[:, 0].clone(), s[:, 0].clone()
    merged = fi.merge_state(out, lse, v[:, 1], s[:, 1])
    fi.merge_state_in_place(out, lse, v[:, 1], s[:, 1], mask)
    rows = torch.ones(5, dtype=torch.bool) if mask is None else mask
    assert torch.equal(out[rows], merged[0][rows]) and torch.equal(lse[rows], merged[1][rows])
    assert torch.equal(out[~rows], v[:, 0][~rows]) and torch.equal(lse[~rows], s[:, 0][~rows])


# Pages


def test_batch_indices_and_positions():
    starts = torch.tensor([0, 1, 3, 3, 6], dtype=I32)
    lengths = torch.tensor([5, 4, 9, 3], dtype=I32)
    where = fi.get_batch_indices_positions(starts, lengths, 8)
    assert where[0].tolist() == [0, 1, 1, 3, 3, 3, -1, -1] and where[1].tolist() == [4, 2, 3, 0, 1, 2, 0, 0]
    assert all(x.dtype == I32 for x in where)
    buffers = torch.full((8,), 7, dtype=I32), torch.full((8,), 7, dtype=I32)
    got = fi.get_batch_indices_positions(starts, lengths, 8, *buffers)
    assert got[0] is buffers[0] and got[1] is buffers[1] and torch.equal(got[1], where[1])


@pytest.mark.parametrize("page_size", (1, 4))
@pytest.mark.parametrize("form", ("tuple NHD", "combined HND"))
def test_append_paged_kv_cache(page_size, form):
    p = build(replace(MIXED, page_size=page_size, qo_lens=(3, 0, 1, 18), kv_lens=(20, 7, 33, 18), padding=2))
    k, v = new_tokens(p)
    lengths = fi.get_seq_lens(p.batch.kv_indptr, p.batch.last_page_len, page_size)
    where = fi.get_batch_indices_positions(p.batch.qo_indptr, lengths, len(k))
    cache = cache_of(p, form)
    layout = form.split()[1]
    fi.append_paged_kv_cache(k, v, *where, cache, p.batch.page_table, *table(p)[::2], layout)
    wanted = p.kv.k_cache.clone(), p.kv.v_cache.clone()
    write_in_loops(p.batch, k, v, *wanted)
    got = cache if isinstance(cache, tuple) else cache.unbind(1)
    got = [x.transpose(1, 2) if layout == "HND" else x for x in got]
    for mine, exact in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, exact, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("sizes", ((3, 8, 21), (0, 1, 0), (64,)), ids=str)
def test_masks_are_packed_on_the_device(sizes):
    """By operations of fixed shape, as each sequence on its own."""
    torch.manual_seed(0)
    mask = torch.rand(sum(sizes)) < 0.5
    counts = torch.tensor(sizes, dtype=I32)
    packed, edges = segment_packbits(mask, indptr(sizes), "little")
    made = pack(mask, counts)
    assert torch.equal(made[: len(packed)], packed) and not made[len(packed) :].any()
    assert torch.equal(byte_offsets(counts), edges.long())


# What is not carried says so


REFUSED = {
    "ROPE_LLAMA": {"pos_encoding_mode": "ROPE_LLAMA"},
    "prefix_len_ptr": {"prefix_len_ptr": torch.tensor([1])},
    "token_pos_in_items_len": {"token_pos_in_items_len": 4},
    "o_data_type": {"o_data_type": torch.bfloat16},
    "fp8 queries": {"q_data_type": torch.float8_e4m3fn},
    "cache under": {"kv_data_type": torch.bfloat16},
}


@pytest.mark.parametrize("words", REFUSED)
def test_plan_refuses_by_name(words):
    with pytest.raises(NotImplementedError, match=words):
        prefill(build(MIXED), **REFUSED[words])


def test_a_variant_that_the_spec_has_no_field_for_is_named():
    arguments = ((4, 2), (64, 64), 4, True, FP32)
    assert spec_for(*arguments, window_left=-1, no_such_variant=0.0) == AttentionSpec(4, 2, 64, 64, 4, True, FP32)
    with pytest.raises(NotImplementedError, match="no_such_variant"):
        spec_for(*arguments, no_such_variant=2.0)


def test_other_refusals_by_name():
    p = build(MIXED)
    cache = (p.kv.k_cache, p.kv.v_cache)
    for words, options in {
        "jit_args": {"jit_args": ["x"]},
        "cudnn": {"backend": "cudnn"},
    }.items():
        with pytest.raises(NotImplementedError, match=words):
            fi.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, **options)
    for words, options in {
        "kv_cache_sf": {"kv_cache_sf": cache},
        "skip_softmax": {"skip_softmax_threshold_scale_factor": 0.5},
    }.items():
        with pytest.raises(NotImplementedError, match=words):
            prefill(p).run(p.q, cache, **options)
    with pytest.raises(NotImplementedError, match="args"):
        prefill(p).run(p.q, cache, torch.zeros(1))
    with pytest.raises(NotImplementedError, match="nvfp4"):
        prefill(p).run(p.q, tuple(x.to(torch.uint8) for x in cache))
    with pytest.raises(NotImplementedError, match="head_dim=512"):
        decode(build(DECODE)).plan(*table(p), 4, 2, 512, 4)
    with pytest.raises(NotImplementedError, match="scale_q"):
        fi.single_prefill_with_kv_cache(p.q, p.q, p.q, scale_q=torch.ones(4))
    with pytest.raises(NotImplementedError, match="window_right"):
        decode(build(DECODE), window_right=2)
    with pytest.raises(KeyError, match="kv_layout"):
        fi.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, "DNH")
    with pytest.raises(KeyError, match="pos_encoding_mode"):
        prefill(p, pos_encoding_mode="YARN")


def test_backend_names_are_accepted():
    p = build(MIXED)
    for backend in ("auto", "fa2", "fa3", "trtllm-gen", "cute-dsl"):
        fi.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, backend=backend)
    out, lse = prefill(p, use_fp16_qk_reduction=True, fixed_split_size=4, disable_split_kv=True).run(
        p.q, (p.kv.k_cache, p.kv.v_cache), return_lse=True, enable_pdl=True
    )
    assert_matches(p, out, lse)


def test_signatures_begin_as_flashinfer_has_them():
    """Orders of arguments that callers pass by position."""

    def order(function, count):
        return list(inspect.signature(function).parameters)[:count]

    plan = (
        "self qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len num_qo_heads num_kv_heads head_dim_qk"
    )
    plan += " page_size head_dim_vo custom_mask packed_custom_mask causal pos_encoding_mode use_fp16_qk_reduction"
    plan += " sm_scale window_left logits_soft_cap rope_scale rope_theta q_data_type kv_data_type o_data_type"
    assert order(fi.BatchPrefillWithPagedKVCacheWrapper.plan, 23) == plan.split()
    ragged = "self qo_indptr kv_indptr num_qo_heads num_kv_heads head_dim_qk head_dim_vo custom_mask packed_custom_mask"
    ragged += " causal pos_encoding_mode use_fp16_qk_reduction window_left logits_soft_cap sm_scale"
    assert order(fi.BatchPrefillWithRaggedKVCacheWrapper.plan, 15) == ragged.split()
    single = "q k v scale_q scale_k scale_v o_dtype custom_mask packed_custom_mask causal kv_layout pos_encoding_mode"
    assert order(fi.single_prefill_with_kv_cache, 12) == single.split()
    batch = "self qo_indptr kv_indptr kv_indices kv_len_arr num_qo_heads num_kv_heads head_dim_qk head_dim_vo page_size"
    assert order(fi.BatchAttention.plan, 13) == [*batch.split(), "causal", "sm_scale", "logits_soft_cap"]


def test_reference_spec_is_what_wrappers_plan():
    """The oracle above judged the same problem that FlashInfer's arguments describe."""
    p = build(MIXED)
    spec = prefill(p)._spec
    assert spec == AttentionSpec(4, 2, 64, 64, 4, True, FP32) == p.spec
    assert reference(spec, p.q, p.kv.k_cache, p.kv.v_cache, p.batch)[0].shape == p.q.shape
