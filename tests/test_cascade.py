"""Cascade attention: levels of shared keys merge to what the flat batch gives."""

from dataclasses import replace

import pytest
import torch
from inputs import BF16, FP16, FP32, I32, Problem, indptr, pages_of
from tolerance import assert_matches

import octavo
from octavo import AttentionSpec, PagedBatch, PagedKV
from octavo.cascade import CascadeAttention, cascade
from octavo.reference import merge_reference, reference


def csr(qo_lens, tables, lengths, page_size):
    """A batch whose sequence i has the pages tables[i] and lengths[i] keys."""
    last = [n - (len(t) - 1) * page_size if t else 0 for n, t in zip(lengths, tables, strict=True)]
    ids = torch.tensor([page for table in tables for page in table], dtype=I32)
    return PagedBatch.csr(indptr(qo_lens), indptr(map(len, tables)), ids, torch.tensor(last, dtype=I32))


def tree(q_lens, shared, own, *, page_size=4, dtype=FP32, seed=0, causal=True, dims=(32, 32)):
    """(levels, flat problem). shared: per level, [(sequences in the group, keys)], keys whole pages; own: keys."""
    torch.manual_seed(seed)
    groups = [keys for level in shared for _, keys in level]
    counts = pages_of([*groups, *own], page_size)
    ids = torch.randperm(sum(counts) + 3)[: sum(counts)].split(counts)
    tables = [x.tolist() for x in ids]
    paths, levels, at = [[] for _ in q_lens], [], 0
    for level in shared:
        first, qo_lens = 0, []
        for members, _ in level:
            for sequence in range(first, first + members):
                paths[sequence] += tables[at + len(qo_lens)]
            qo_lens.append(sum(q_lens[first : first + members]))
            first += members
        mine = tables[at : at + len(level)]
        levels.append(csr(qo_lens, mine, [keys for _, keys in level], page_size))
        at += len(level)
    levels.append(csr(q_lens, tables[at:], own, page_size))
    whole = [path + table for path, table in zip(paths, tables[at:], strict=True)]
    lengths = [len(path) * page_size + n for path, n in zip(paths, own, strict=True)]
    spec = AttentionSpec(4, 2, *dims, page_size, causal, dtype)
    k, v = (torch.randn(sum(counts) + 3, page_size, 2, d).to(dtype) for d in dims)
    q = torch.randn(sum(q_lens), 4, dims[0]).to(dtype)
    return levels, Problem(spec, q, PagedKV(k, v), csr(q_lens, whole, lengths, page_size))


TREES = {
    "prefix": ((1, 1, 1), [[(3, 16)]], (3, 7, 4)),
    "prefill": ((5, 2, 9), [[(3, 12)]], (5, 6, 9)),
    "three levels": ((1, 2, 1, 3), [[(4, 20)], [(2, 8), (2, 4)]], (5, 6, 2, 3)),
    "no keys in a group": ((1, 2), [[(2, 0)]], (4, 5)),
    "tokens without own keys": ((2, 1), [[(2, 8)]], (2, 0)),
    "flat": ((3, 1), [], (9, 4)),
}


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("page_size", (1, 4))
def test_cascade_is_the_flat_call(name, page_size):
    levels, flat = tree(*TREES[name], page_size=page_size)
    assert_matches(flat, *cascade(flat.q, flat.kv, levels, backend="cpu"))
    attention = CascadeAttention(flat.spec, len(levels), device="cpu")
    attention.plan(levels)
    for _ in range(2):
        assert_matches(flat, *attention.run(flat.q, flat.kv))


@pytest.mark.parametrize("dtype", (BF16, FP16), ids=str)
def test_half_precision_levels(dtype):
    """Each level rounds its state to the dtype once before the merge: compared with a float64 merge of just those."""
    levels, flat = tree(*TREES["three levels"], dtype=dtype)
    out, lse = cascade(flat.q, flat.kv, levels, sm_scale=0.3)
    states = []
    for i, level in enumerate(levels):
        spec = replace(flat.spec, causal=i == len(levels) - 1)
        states.append(reference(spec, flat.q, flat.kv.k_cache, flat.kv.v_cache, level, 0.3))
    exact_out, exact_lse = merge_reference(*zip(*states, strict=True))
    eps = torch.finfo(dtype).eps
    biggest = max(float(o.abs().max()) for o, _ in states)
    assert out.dtype == dtype and lse.dtype == FP32
    assert (out.double() - exact_out).abs().max() <= 2 * eps * biggest
    assert (lse.double() - exact_lse).abs().max() <= 1e-5 * exact_lse.abs().max().clamp_min(1)


def test_not_causal_and_value_dim():
    levels, flat = tree(*TREES["prefill"], causal=False, dims=(32, 48))
    assert_matches(flat, *cascade(flat.q, flat.kv, levels, causal=False, backend="cpu"))


def test_padding_rows_and_scale_tensor():
    levels, flat = tree(*TREES["prefix"])
    q = torch.cat([flat.q, torch.randn(2, *flat.q.shape[1:])])
    padded = replace(flat, q=q, sm_scale=torch.tensor(0.2))
    assert_matches(padded, *cascade(q, flat.kv, levels, sm_scale=torch.tensor(0.2), backend="cpu"))


def test_dense_levels():
    levels, flat = tree(*TREES["prefix"])
    shared = levels[0]
    dense = PagedBatch.dense(shared.qo_indptr, shared.page_table[None], torch.tensor([16], dtype=I32))
    assert_matches(flat, *cascade(flat.q, flat.kv, [dense, levels[1]], backend="cpu"))


def test_batch_invariant_and_validate_are_passed_on():
    levels, flat = tree(*TREES["prefix"])
    assert_matches(flat, *cascade(flat.q, flat.kv, levels, batch_invariant=True, validate=True, backend="cpu"))


def test_public_name():
    assert octavo.cascade is cascade and octavo.CascadeAttention is CascadeAttention


@pytest.mark.parametrize(
    ("levels", "error", "words"),
    (([], ValueError, "levels: expected one or more"), ([1], TypeError, r"levels\[0\]: expected a PagedBatch")),
)
def test_wrong_levels(levels, error, words):
    _, flat = tree(*TREES["prefix"])
    with pytest.raises(error, match=words):
        cascade(flat.q, flat.kv, levels)


def test_wrong_counts_of_levels():
    levels, flat = tree(*TREES["prefix"])
    attention = CascadeAttention(flat.spec, 3, device="cpu")
    with pytest.raises(ValueError, match="levels: expected 3 batches"):
        attention.plan(levels)
    with pytest.raises(ValueError, match="num_levels"):
        CascadeAttention(flat.spec, 0, device="cpu")


@pytest.mark.gpu
def test_on_a_gpu_without_synchronising():
    levels, flat = tree((1,) * 8, [[(8, 512)]], (33,) * 8, page_size=16, dtype=FP16, dims=(128, 128))
    q, kv = flat.q.cuda(), PagedKV(flat.kv.k_cache.cuda(), flat.kv.v_cache.cuda())
    moved = [level.to("cuda") for level in levels]
    attention = CascadeAttention(flat.spec, 2, device="cuda")
    attention.plan(moved, num_tokens=8)
    attention.run(q, kv)
    torch.cuda.set_sync_debug_mode("error")
    try:
        attention.plan(moved, num_tokens=8)
        out, lse = attention.run(q, kv)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    exact_out, exact_lse = reference(flat.spec, flat.q, flat.kv.k_cache, flat.kv.v_cache, flat.batch)
    torch.testing.assert_close(out.cpu().double(), exact_out, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(lse.cpu().double(), exact_lse, rtol=1e-4, atol=1e-4)
