"""The oracle against PyTorch's attention in float64. Both are written apart, so agreement means something."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from inputs import FP32, Case, build

from octavo.reference import LOG2_E, gather_pages, merge_reference, page_ids, reference, sequence_lengths

CASES = [
    Case("plain", dims=(16, 16), dtype=FP32, padding=0),
    Case("not causal", dims=(16, 16), dtype=FP32, causal=False, padding=0),
    Case("pages of three", page_size=3, dtype=FP32, padding=0),
    Case("group of seven", heads=(7, 1), page_size=16, dtype=FP32, padding=0),
    Case("value dim", dims=(48, 24), heads=(6, 3), page_size=5, dense=True, dtype=FP32, padding=0),
    Case("more queries than keys", (6, 4), (2, 0), dims=(16, 16), page_size=2, dtype=FP32, padding=0),
    Case("negative scale", sm_scale=-0.3, dtype=FP32, padding=0),
]


def pytorch_attention(problem, sequence):
    """SDPA in float64 with an explicit mask: (out, lse) of one sequence without its dead rows, and their number."""
    spec, batch = problem.spec, problem.batch
    q_lens, kv_lens = sequence_lengths(batch, spec.page_size)
    q_len, kv_len, start = q_lens[sequence], kv_lens[sequence], sum(q_lens[:sequence])
    dead = max(q_len - kv_len, 0) if spec.causal else (0 if kv_len else q_len)
    q = problem.q[start + dead : start + q_len].double().transpose(0, 1)
    ids = page_ids(batch, sequence, -(-kv_len // spec.page_size))
    k, v = (gather_pages(x, ids, kv_len).double().transpose(0, 1) for x in (problem.kv.k_cache, problem.kv.v_cache))
    mask = torch.ones(q_len - dead, kv_len, dtype=torch.bool)
    if spec.causal:
        mask = mask.tril(kv_len - (q_len - dead))
    scale = spec.default_scale if problem.sm_scale is None else problem.sm_scale
    out = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, scale=scale, enable_gqa=True)[0]
    logits = q @ k.repeat_interleave(spec.group_size, 0).transpose(-1, -2) * scale
    lse = torch.logsumexp(logits.masked_fill(~mask, -math.inf), -1) * LOG2_E
    return out.transpose(0, 1), lse.transpose(0, 1), dead


@pytest.mark.parametrize("case", CASES, ids=str)
def test_oracle_is_pytorch_attention(case):
    problem = build(case)
    out, lse = problem.expected()
    start = 0
    for sequence, q_len in enumerate(case.qo_lens):
        expected_out, expected_lse, dead = pytorch_attention(problem, sequence)
        rows = slice(start + dead, start + q_len)
        torch.testing.assert_close(out[rows], expected_out, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(lse[rows], expected_lse, rtol=1e-12, atol=1e-13)
        assert not out[start : start + dead].any()
        assert (lse[start : start + dead] == -math.inf).all()
        start += q_len


def test_causal_is_pytorch_lower_right_bias():
    from torch.nn.attention.bias import causal_lower_right

    problem = build(Case("one", (5,), (12,), heads=(2, 2), dims=(16, 16), dtype=FP32, padding=0))
    k, v = (gather_pages(x, page_ids(problem.batch, 0, 12), 12) for x in (problem.kv.k_cache, problem.kv.v_cache))
    q, k, v = (x.double().transpose(0, 1)[None] for x in (problem.q, k, v))
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(5, 12))[0].transpose(0, 1)
    torch.testing.assert_close(problem.expected()[0], expected, rtol=1e-6, atol=1e-7)


def test_rows_are_a_selection():
    problem = build(Case("some rows", dtype=FP32))
    out, lse = problem.expected()
    rows = [21, 0, 3, 5]
    some_out, some_lse = problem.expected(rows)
    assert torch.equal(some_out, out[rows]) and torch.equal(some_lse, lse[rows])


def test_padding_rows_see_no_key():
    problem = build(Case("padding", dtype=FP32, padding=4))
    out, lse = problem.expected()
    assert not out[-4:].any() and (lse[-4:] == -math.inf).all()


def test_lse_counts_keys_in_base_2():
    problem = build(Case("zero queries", (4,), (4,), dtype=FP32, padding=0))
    problem.q.zero_()
    torch.testing.assert_close(problem.expected()[1][:, 0], torch.tensor([1.0, 2, 3, 4]).double().log2())


@pytest.mark.parametrize("cuts", [(0, 9, 33), (0, 1, 2, 33), (0, 0, 8, 8, 20, 33)])
def test_merge_oracle_is_attention_over_all_keys(cuts):
    whole = build(Case("whole", (4,), (33,), causal=False, dtype=FP32, padding=0))
    parts = []
    for low, high in itertools.pairwise(cuts):
        batch = type(whole.batch).csr(whole.batch.qo_indptr, torch.tensor([low, high]), whole.batch.page_table)
        parts.append(reference(whole.spec, whole.q, whole.kv.k_cache, whole.kv.v_cache, batch))
    out, lse = merge_reference(*zip(*parts, strict=True))
    expected_out, expected_lse = whole.expected()
    torch.testing.assert_close(out, expected_out, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-13)


def test_merge_oracle_keeps_empty_rows_empty():
    nothing = torch.full((2, 1), -math.inf)
    out, lse = merge_reference([torch.full((2, 1, 4), math.nan), torch.zeros(2, 1, 4)], [nothing, nothing])
    assert not out.any() and (lse == -math.inf).all()
