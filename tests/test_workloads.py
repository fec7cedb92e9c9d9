"""Workloads, the shipped sample, row sampling, the tolerance rule, and FlashInfer-Trace folders."""

import json
import math
from importlib import resources

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo import AttentionSpec, PagedBatch, attend
from octavo.bench.roofline import Ceilings
from octavo.bench.sampling import sample_rows
from octavo.bench.trace import is_trace, read_trace
from octavo.bench.verify import locate_rows, verify_rows
from octavo.bench.workloads import Workload, make_inputs, parse_jsonl, sample
from octavo.reference import reference, sequence_lengths

SPEC = AttentionSpec(4, 2, 32, page_size=4)
CPU = torch.device("cpu")
lengths = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), min_size=1, max_size=8)


def workload_of(pairs):
    return Workload("w", tuple(q for q, _ in pairs), tuple(k for _, k in pairs))


def visible(spec, q_lens, kv_lens):
    seen = 0
    for q_len, kv_len in zip(q_lens, kv_lens, strict=True):
        for i in range(q_len):
            seen += sum(not spec.causal or j <= i + kv_len - q_len for j in range(kv_len))
    return seen


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=4), st.booleans())
def test_visible_pairs_are_counted(pairs, causal):
    w = workload_of(pairs)
    assert w.visible_pairs(causal) == visible(AttentionSpec(1, 1, 16, causal=causal), w.qo_lens, w.kv_lens)


@given(lengths, st.integers(1, 5000), st.integers(10, 2000))
def test_shrunk_keeps_the_shape(pairs, max_pairs, max_lengths):
    w = workload_of(pairs)
    small = w.shrunk(max_pairs, max_lengths)
    assert [n > 0 for n in (*small.qo_lens, *small.kv_lens)] == [n > 0 for n in (*w.qo_lens, *w.kv_lens)]
    for q, k, small_q, small_k in zip(w.qo_lens, w.kv_lens, small.qo_lens, small.kv_lens, strict=True):
        assert small_q <= q and small_k <= k
        assert small_q <= small_k or q > k
    assert small.num_tokens + sum(small.kv_lens) <= max(max_lengths, 0) + 2 * len(pairs)
    assert w.shrunk(10**9) is w


def test_sample_is_real_and_attributed():
    batches = sample()
    assert 10 <= len(batches) <= 16 and len({b.name for b in batches}) == len(batches)
    families = {b.name.rsplit("-", 1)[0] for b in batches}
    sources = resources.files("octavo").joinpath("data/SOURCES.md").read_text()
    for family in families:
        assert f"{family}-\\*" in sources
    dead = [b for b in batches if any(q > k for q, k in zip(b.qo_lens, b.kv_lens, strict=True))]
    decode = [b for b in batches if set(b.qo_lens) == {1}]
    assert len(dead) >= 2 and len(decode) >= 2
    assert all(b.source for b in batches)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("not json", "expected a JSON object"),
        ('{"qo_lens": [1]}', "kv_lens"),
        ('{"qo_lens": [1], "kv_lens": [1, 2]}', "as many kv_lens as qo_lens"),
        ('{"qo_lens": [-1], "kv_lens": [1]}', "lengths >= 0"),
        ('{"qo_lens": [true], "kv_lens": [1]}', "lengths >= 0"),
        ('{"qo_lens": [1.5], "kv_lens": [1]}', "lengths >= 0"),
        ("[1, 2]", "expected a JSON object"),
    ],
)
def test_bad_lines_are_named(line, said):
    with pytest.raises(ValueError, match=r"lines:2: .*fix:") as error:
        list(parse_jsonl(['{"qo_lens": [1], "kv_lens": [1]}', line], "lines"))
    assert said in str(error.value)


@given(lengths, st.booleans(), st.integers(1, 60), st.integers(1, 5000), st.integers(0, 3))
def test_sampled_rows_are_few_and_telling(pairs, causal, max_rows, max_keys, padding):
    w = workload_of(pairs)
    spec = AttentionSpec(4, 2, 16, page_size=4, causal=causal)
    batch = _lengths_only(w, spec)
    tokens = w.num_tokens + padding
    rows = sample_rows(spec, batch, tokens, max_rows=max_rows, max_keys=max_keys)
    assert rows == sorted(set(rows)) and all(0 <= r < tokens for r in rows)
    assert len(rows) <= max(max_rows, min(padding, 2)) + 1
    assert bool(rows) == bool(tokens)
    located = locate_rows(spec, batch, rows)
    gathered = sum(w.kv_lens[s] for s in {r.sequence for r in located if r.seen})
    assert sum(r.seen for r in located) + gathered <= max_keys or len([r for r in located if r.seen]) == 1


def _lengths_only(w, spec):
    pages = [-(-n // spec.page_size) for n in w.kv_lens]
    last = [n - (p - 1) * spec.page_size if p else 0 for n, p in zip(w.kv_lens, pages, strict=True)]

    def offsets(counts):
        return torch.tensor([0, *counts]).cumsum(0)

    ids = torch.zeros(sum(pages), dtype=torch.int64)
    return PagedBatch.csr(offsets(w.qo_lens), offsets(pages), ids, torch.tensor(last))


def test_sampled_rows_hold_ends_and_edges():
    w = Workload("w", (200, 30), (1000, 10))
    rows = sample_rows(AttentionSpec(8, 1, 16), _lengths_only(w, AttentionSpec(8, 1, 16)), 232, max_rows=200)
    assert {0, 199, 200, 229} <= set(rows)  # first and last of each sequence
    assert {219, 220} <= set(rows)  # the last row that sees no key, the first that sees one
    assert {7, 8, 15, 16} <= set(rows)  # edges of query tiles of 64 and 128 rows
    assert {230, 231} <= set(rows)  # padding


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def solved(request):
    spec = AttentionSpec(4, 2, 32, page_size=4, dtype=request.param)
    p = make_inputs(Workload("w", (5, 3, 70), (40, 1, 90)), spec, CPU)
    exact_out, exact_lse = reference(spec, p.q, p.kv.k_cache, p.kv.v_cache, p.batch)
    return p, exact_out.to(spec.dtype), exact_lse.float()


def verdict_of(p, out, lse, **more):
    return verify_rows(p.spec, p.q, p.kv, p.batch, out, lse, range(p.q.shape[0]), **more)


def test_rounded_truth_passes(solved):
    p, out, lse = solved
    verdict = verdict_of(p, out, lse)
    assert verdict.ok and verdict.rows == 78 and verdict.dead_rows == 2 and 0 < verdict.worst <= 1
    assert verdict.message == ""


def _swap_heads(out, lse):
    out[77, 0], out[77, 1] = out[77, 1].clone(), out[77, 0].clone()


def _drop_a_key(p, out, lse):
    shorter = PagedBatch.csr(p.batch.qo_indptr, p.batch.kv_indptr, p.batch.page_table, p.batch.last_page_len - 1)
    wrong_out, wrong_lse = reference(p.spec, p.q, p.kv.k_cache, p.kv.v_cache, shorter, rows=[77])
    out[77], lse[77] = wrong_out[0].to(out.dtype), wrong_lse[0].float()


DAMAGE = {
    "one element": lambda p, out, lse: out[40, 1].select(0, 3).add_(0.5),
    "heads swapped": lambda p, out, lse: _swap_heads(out, lse),
    "a key dropped": _drop_a_key,
    "lse in base e": lambda p, out, lse: lse.mul_(math.log(2)),
    "lse slightly off": lambda p, out, lse: lse[30].add_(1e-2),
    "NaN": lambda p, out, lse: out[3].fill_(math.nan),
    "Inf": lambda p, out, lse: lse[3].fill_(math.inf),
    "dead row not zero": lambda p, out, lse: out[5].fill_(1e-30),
    "dead row finite": lambda p, out, lse: lse[5].fill_(-1e30),
    "dead row NaN": lambda p, out, lse: out[5].fill_(math.nan),
    "living row empty": lambda p, out, lse: (out[60].zero_(), lse[60].fill_(-math.inf)),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_wrong_results_fail(solved, damage):
    p, out, lse = solved[0], solved[1].clone(), solved[2].clone()
    damage(p, out, lse)
    verdict = verdict_of(p, out, lse)
    assert not verdict.ok and verdict.worst > 1 and "row" in verdict.message


def test_wrong_shape_fails(solved):
    p, out, lse = solved
    assert not verdict_of(p, out[:-1], lse).ok
    assert not verdict_of(p, out.double(), lse).ok


@pytest.mark.parametrize("scale", [0.0, -0.3, 2.0])
def test_rule_takes_any_scale(scale):
    spec = AttentionSpec(4, 2, 32, 16, dtype=torch.float16)
    p = make_inputs(Workload("w", (5, 1), (40, 300)), spec, CPU)
    out, lse = reference(spec, p.q, p.kv.k_cache, p.kv.v_cache, p.batch, scale)
    assert verdict_of(p, out.half(), lse.float(), sm_scale=scale).ok
    assert not verdict_of(p, out.half(), lse.float(), sm_scale=scale + 0.5).ok


def test_roofline_is_the_slower_of_two():
    w = Workload("w", (10,), (100,))
    flops, moved = w.flops(SPEC), w.bytes(SPEC)
    assert Ceilings(flops, moved * 10).bound_s(w, SPEC) == 1.0
    assert Ceilings(flops * 10, moved).bound_s(w, SPEC) == 1.0


def write_trace(root, *, op="gqa_paged", page_size=4, name="gqa_paged_prefill_causal_h4_kv2_d32", rows=(), tensors=()):
    """A FlashInfer-Trace folder with one definition."""
    from safetensors.torch import save_file

    ragged, decode = op == "gqa_ragged", "decode" in name
    constants = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 32}
    constants |= {} if ragged else {"page_size": page_size}
    indices = ["kv_indptr"] if decode else ["qo_indptr", "kv_indptr"]
    inputs = {"q": {"shape": ["total_q", "num_qo_heads", "head_dim"], "dtype": "bfloat16"}}
    inputs |= {n: {"shape": None, "dtype": "bfloat16"} for n in (("k", "v") if ragged else ("k_cache", "v_cache"))}
    inputs |= {n: {"shape": None, "dtype": "int32"} for n in indices + ([] if ragged else ["kv_indices"])}
    definition = {
        "name": name,
        "op_type": op,
        "axes": {n: {"type": "const", "value": v} for n, v in constants.items()} | {"total_q": {"type": "var"}},
        "inputs": inputs | {"sm_scale": {"shape": None, "dtype": "float32"}},
    }
    (root / "definitions" / op).mkdir(parents=True)
    (root / "workloads" / op).mkdir(parents=True)
    (root / "definitions" / op / f"{name}.json").write_text(json.dumps(definition))
    text = "\n".join(json.dumps({"definition": name, "workload": row}) for row in rows)
    (root / "workloads" / op / f"{name}.jsonl").write_text(text + "\n")
    if tensors:
        save_file(dict(tensors), root / "blob.safetensors")
    return root


def stored(key):
    return {"type": "safetensors", "path": "./blob.safetensors", "tensor_key": key}


INDICES = {
    "qo_indptr": torch.tensor([0, 2, 2, 6], dtype=torch.int32),
    "kv_indptr": torch.tensor([0, 2, 3, 4], dtype=torch.int32),
    "kv_indices": torch.tensor([7, 1, 4, 0], dtype=torch.int32),
    "kv_last_page_len": torch.tensor([3, 1, 2], dtype=torch.int32),
}
AXES = {"len_indptr": 4, "total_q": 6, "num_kv_indices": 4, "num_pages": 9}
ROW = {"uuid": "0123456789abcdef", "axes": AXES, "inputs": {n: stored(n) for n in INDICES}}


def test_trace_with_stored_tensors(tmp_path):
    q = torch.randn(6, 4, 32, dtype=torch.bfloat16)
    inputs = ROW["inputs"] | {"q": stored("q"), "sm_scale": {"type": "scalar", "value": 0.25}}
    write_trace(tmp_path, rows=[ROW | {"inputs": inputs}], tensors=INDICES | {"q": q})
    assert is_trace(tmp_path)
    (batch,), skipped = read_trace(tmp_path)
    assert skipped == [] and batch.sm_scale == 0.25 and batch.workload.name.endswith("/01234567")
    assert batch.spec == AttentionSpec(4, 2, 32, page_size=4)
    assert batch.workload.qo_lens == (2, 0, 4) and batch.workload.kv_lens == (7, 1, 2)
    p = batch.make_inputs(CPU)
    assert torch.equal(p.q, q) and p.kv.k_cache.shape == (9, 4, 2, 32)
    used = [0, 1, 4, 7]
    assert p.kv.k_cache[used].abs().sum((1, 2, 3)).all() and not p.kv.k_cache[[2, 3, 5, 6, 8]].any()
    out, lse = attend(p.q, p.kv, p.batch, sm_scale=0.25)
    assert verdict_of(p, out, lse, sm_scale=0.25).ok


def test_trace_without_tensors_is_drawn_validly(tmp_path):
    row = {"uuid": "u", "axes": AXES, "inputs": {"q": {"type": "random"}}}
    write_trace(tmp_path, rows=[row])
    (batch,), _ = read_trace(tmp_path)
    assert batch.workload.num_tokens == 6 and len(batch.workload.qo_lens) == 3
    kv_lens = sequence_lengths(batch.batch, 4)[1]
    assert sum(kv_lens) == 16 and batch.batch.page_table.unique().numel() == 4


def test_trace_decode_and_ragged(tmp_path):
    decode = {
        "uuid": "d",
        "axes": {"batch_size": 3, **AXES},
        "inputs": {n: stored(n) for n in INDICES if n != "qo_indptr"},
    }
    write_trace(tmp_path, name="gqa_paged_decode_h4_kv2_d32", rows=[decode], tensors=INDICES)
    ragged = {"uuid": "r", "axes": {"len_indptr": 3, "total_q": 5, "total_kv": 8}, "inputs": {}}
    write_trace(tmp_path, op="gqa_ragged", name="gqa_ragged_prefill_h4_kv2_d32", rows=[ragged])
    batches, _ = read_trace(tmp_path)
    by_name = {b.workload.source: b for b in batches}
    assert by_name["gqa_paged_decode_h4_kv2_d32"].workload.qo_lens == (1, 1, 1)
    other = by_name["gqa_ragged_prefill_h4_kv2_d32"]
    assert not other.spec.causal and other.spec.page_size == 1 and sum(other.workload.kv_lens) == 8


def test_trace_skips_other_operators(tmp_path):
    write_trace(tmp_path, rows=[ROW], tensors=INDICES)
    (tmp_path / "definitions" / "gemm").mkdir()
    (tmp_path / "definitions" / "gemm" / "gemm_n128.json").write_text('{"op_type": "gemm"}')
    batches, skipped = read_trace(tmp_path)
    assert len(batches) == 1 and skipped == ["gemm_n128"]


BROKEN = {
    "no file": (ROW, {}, "a safetensors file"),
    "unknown key": (ROW | {"inputs": ROW["inputs"] | {"kv_indices": stored("nope")}}, INDICES, "'nope'"),
    "unknown type": (ROW | {"inputs": {"qo_indptr": {"type": "magic"}}}, INDICES, "random, scalar or safetensors"),
    "no axis": (ROW | {"axes": {}}, INDICES, "axes.num_kv_indices"),
    "page id too large": (ROW | {"axes": AXES | {"num_pages": 3}}, INDICES, "kv_indices: expected values from 0 to 2"),
    "too few rows": (ROW | {"axes": AXES | {"total_q": 4}}, INDICES, "qo_indptr"),
    "scale is text": (
        ROW | {"inputs": ROW["inputs"] | {"sm_scale": {"type": "scalar", "value": "x"}}},
        INDICES,
        "a number",
    ),
}


@pytest.mark.parametrize(("row", "tensors", "said"), BROKEN.values(), ids=BROKEN)
def test_broken_traces_are_named(tmp_path, row, tensors, said):
    write_trace(tmp_path, rows=[row], tensors=tensors)
    with pytest.raises(ValueError, match="fix:") as error:
        read_trace(tmp_path)
    assert said in str(error.value)


def test_lfs_pointer_is_named(tmp_path):
    write_trace(tmp_path, rows=[ROW])
    (tmp_path / "blob.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ValueError, match="Git LFS pointer"):
        read_trace(tmp_path)
