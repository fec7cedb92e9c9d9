"""Variants against the oracle, alone and combined; the oracle against dense PyTorch; what plain calls are spared."""

import inspect
import itertools
import math
from dataclasses import replace

import pytest
import torch
from inputs import BAD_PAGE, FP16, FP32, Case, Problem, build

import octavo
from octavo import AttentionSpec, BatchAttention, PagedBatch, PagedKV
from octavo.backends import cpu_variants
from octavo.bench.verify import LOG2_ROUNDING, PEER_FACTOR
from octavo.reference import LOG2_E, page_ids, reference, sequence_lengths
from octavo.variants import Extras

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
VALUES = ("sinks", "alibi_slopes", "k_scale", "v_scale")
MIXED = Case("mixed", (3, 0, 1, 18, 5), (20, 7, 33, 18, 3), page_size=4, dtype=FP32)
"""Rows that see no key (5 queries of 3 keys) and rows of no sequence are in it."""

VARIANTS = {
    "window": {"window_left": 5},
    "own key alone": {"window_left": 0},
    "two windows": {"causal": False, "window_left": 5, "window_right": 3},
    "right window": {"causal": False, "window_right": 0},
    "soft-cap": {"logits_soft_cap": 1.5},
    "sinks": {"sinks": True},
    "alibi": {"alibi": True},
    "mask": {"custom_mask": True},
    "e4m3": {"kv_dtype": E4M3},
    "e5m2": {"kv_dtype": E5M2},
    "all causal": {"window_left": 9, "logits_soft_cap": 2.0, "sinks": True, "alibi": True, "kv_dtype": E4M3},
    "all masked": {"window_left": 9, "logits_soft_cap": 2.0, "sinks": True, "alibi": True, "custom_mask": True},
}


def masks_of(p: Problem) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    lengths = zip(*sequence_lengths(p.batch, p.spec.page_size), strict=True)
    return [torch.rand(q, n, generator=generator) < 0.5 for q, n in lengths]


def packed(masks: list[torch.Tensor]) -> torch.Tensor:
    """Bit i of a byte is its element i; each mask begins a byte."""
    weights = 1 << torch.arange(8)
    bits = [torch.nn.functional.pad(m.flatten(), (0, -m.numel() % 8)).view(-1, 8) for m in masks]
    return torch.cat([(x * weights).sum(1) for x in bits]).to(torch.uint8)


def make(case: Case, **variants) -> tuple[Problem, dict]:
    """A problem whose spec has the variants, and its values."""
    p = build(case)
    spec = replace(p.spec, **variants)
    generator = torch.Generator().manual_seed(2)
    values = {}
    if spec.sinks:
        values["sinks"] = torch.randn(spec.num_qo_heads, generator=generator)
    if spec.alibi:
        values["alibi_slopes"] = torch.rand(spec.num_qo_heads, generator=generator) / 4
    if spec.kv_dtype is not None:
        values |= {"k_scale": torch.rand(spec.num_kv_heads, generator=generator) + 0.5, "v_scale": 0.7}
        p = p.with_(kv=PagedKV(*(x.to(spec.kv_dtype) for x in (p.kv.k_cache, p.kv.v_cache))))
    p = p.with_(spec=spec)
    return (
        p.with_(batch=p.batch.with_mask(torch.cat([m.flatten() for m in masks_of(p)]))) if spec.custom_mask else p
    ), values


def dense(p: Problem, values: dict, dtype: torch.dtype):
    """Each sequence as whole matrices in `dtype`: (out, lse, largest sum of |q k| per row) of every row."""
    spec, (q_lens, kv_lens) = p.spec, sequence_lengths(p.batch, p.spec.page_size)
    group = spec.group_size
    sinks, slopes, k_scale, v_scale = (torch.as_tensor(values.get(n, 1.0), dtype=dtype) for n in VALUES)
    masks = masks_of(p)
    results, starts = [], itertools.accumulate(q_lens, initial=0)
    for i, (start, q_len, n) in enumerate(zip(starts, q_lens, kv_lens, strict=False)):
        ids = page_ids(p.batch, i, -(-n // spec.page_size))
        k, v = (x.to(dtype)[ids].flatten(0, 1)[:n] for x in (p.kv.k_cache, p.kv.v_cache))
        k, v = ((x * s.view(-1, 1)).repeat_interleave(group, 1) for x, s in ((k, k_scale), (v, v_scale)))
        q = p.q[start : start + q_len].to(dtype)
        logits = torch.einsum("qhd,khd->qhk", q, k) * spec.default_scale
        longest = torch.einsum("qhd,khd->qhk", q.abs(), k.abs()) * spec.default_scale
        away = torch.arange(n)[None] - (torch.arange(q_len)[:, None] + n - q_len)
        seen = masks[i] if spec.custom_mask else (away <= 0 if spec.causal else torch.ones(q_len, n, dtype=torch.bool))
        seen = seen & ((away >= -spec.window_left) | (spec.window_left < 0))
        seen = seen & ((away <= spec.window_right) | (spec.window_right < 0))
        if spec.alibi:
            logits = logits + slopes[:, None] * away[:, None].to(dtype)
        if spec.logits_soft_cap:
            logits = spec.logits_soft_cap * torch.tanh(logits / spec.logits_soft_cap)
        logits = logits.masked_fill(~seen[:, None], -math.inf)
        extra = sinks.expand(q_len, -1)[..., None] if spec.sinks else torch.full((q_len, q.shape[1], 1), -math.inf)
        lse = torch.cat([logits, extra.to(dtype)], -1).logsumexp(-1)
        weights = torch.exp(logits - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
        results.append((torch.einsum("qhk,khd->qhd", weights, v), lse * LOG2_E, longest.flatten(1).amax(-1)))
    return tuple(torch.cat(x) for x in zip(*results, strict=True))


def check(p: Problem, values: dict, out: torch.Tensor, lse: torch.Tensor) -> None:
    """The tolerance rule: twice PyTorch's own error, one rounding of out, one per product in lse."""
    exact, exact_lse = reference(p.spec, p.q, p.kv.k_cache, p.kv.v_cache, p.batch, **values)
    peer, peer_lse, longest = (x.double() for x in dense(p, values, FP32))
    used = len(peer)
    live = exact_lse[:used].isfinite()
    assert torch.equal(lse.isfinite(), exact_lse.isfinite())
    assert not out[used:].any()
    torch.testing.assert_close(lse[used:], exact_lse[used:].float(), rtol=LOG2_ROUNDING, atol=0)
    size = exact[:used].abs().amax((1, 2))
    own = ((peer - exact[:used]).abs().amax((1, 2)) / size.clamp(min=1e-30)).max()
    allowed = size * (PEER_FACTOR * own + torch.finfo(p.q.dtype).eps / 2)
    assert ((out[:used].double() - exact[:used]).abs().amax((1, 2)) <= allowed).all()
    own_lse = (peer_lse - exact_lse[:used])[live].abs().max()
    products = p.spec.head_dim * torch.finfo(FP32).eps / 2 * LOG2_E * longest[:, None]
    allowed = PEER_FACTOR * own_lse + products + LOG2_ROUNDING * exact_lse[:used].abs().clamp(min=1.0)
    assert ((lse[:used].double() - exact_lse[:used]).abs() <= allowed)[live].all()


def arguments(spec: AttentionSpec, values: dict) -> dict:
    """Of octavo.attend."""
    fields = {n: getattr(spec, n) for n in ("causal", "window_left", "window_right", "logits_soft_cap")}
    return fields | values


@pytest.mark.parametrize("name", VARIANTS)
def test_the_oracle_is_dense_attention(name):
    p, values = make(MIXED, **VARIANTS[name])
    exact, exact_lse = reference(p.spec, p.q, p.kv.k_cache, p.kv.v_cache, p.batch, **values)
    out, lse, _ = dense(p, values, torch.float64)
    torch.testing.assert_close(exact[: len(out)], out)
    torch.testing.assert_close(exact_lse[: len(out)], lse)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("dtype", (FP32, FP16), ids=str)
@pytest.mark.parametrize("is_dense", (False, True), ids=("csr", "dense"))
def test_cpu(name, dtype, is_dense):
    p, values = make(replace(MIXED, dtype=dtype, dense=is_dense), **VARIANTS[name])
    out, lse = octavo.attend(p.q, p.kv, p.batch, backend="cpu", **arguments(p.spec, values))
    check(p, values, out, lse)
    attention = BatchAttention(p.spec, device="cpu")
    attention.plan(p.batch, num_tokens=p.q.shape[0])
    for got, expected in zip(attention.run(p.q, p.kv, **values), (out, lse), strict=True):
        assert torch.equal(got, expected)


def test_all_pairs_of_variants():
    alone = [VARIANTS[n] for n in ("window", "soft-cap", "sinks", "alibi", "mask", "e4m3")]
    for first, second in itertools.combinations(alone, 2):
        p, values = make(replace(MIXED, dims=(32, 16)), **first, **second)
        check(p, values, *octavo.attend(p.q, p.kv, p.batch, backend="cpu", **arguments(p.spec, values)))


@pytest.mark.parametrize("name", ("two windows", "all causal", "all masked"))
def test_many_blocks_and_tiles(name, monkeypatch):
    monkeypatch.setattr(cpu_variants, "BLOCK_KEYS", 16)
    monkeypatch.setattr(cpu_variants, "SCORES", 4 * 16 * 7)
    p, values = make(replace(MIXED, qo_lens=(40, 1, 9), kv_lens=(90, 130, 9)), **VARIANTS[name])
    check(p, values, *octavo.attend(p.q, p.kv, p.batch, backend="cpu", **arguments(p.spec, values)))


@pytest.mark.parametrize("extra", ({}, {"window_left": 6}), ids=str)
def test_packed_masks_and_gaps_between_them(extra):
    p, values = make(MIXED, custom_mask=True, **extra)
    masks = masks_of(p)
    expected = octavo.attend(p.q, p.kv, p.batch, **extra)
    check(p, values, *expected)
    apart = torch.cat([torch.cat([m.flatten(), torch.ones(3, dtype=torch.bool)]) for m in masks])
    offsets = torch.tensor([0, *(m.numel() + 3 for m in masks)]).cumsum(0)
    for mask, indptr in ((packed(masks), None), (apart, offsets)):
        batch = p.batch.with_mask(mask, indptr)
        for got, exact in zip(octavo.attend(p.q, p.kv, batch, **extra), expected, strict=True):
            assert torch.equal(got, exact)


def test_keys_outside_the_window_are_not_looked_at():
    """Their page ids lead nowhere: reading one raises."""
    p, _ = make(replace(MIXED, qo_lens=(2,), kv_lens=(41,), padding=0), window_left=6)
    table = p.batch.page_table.clone()
    table[: (41 - 2 - 6) // 4] = BAD_PAGE
    far = replace(p.batch, page_table=table)
    results = []
    for batch in (p.batch, far):
        out, lse = torch.empty_like(p.q), torch.empty(p.q.shape[:2])
        call = octavo.backends.AttentionCall(p.spec, batch, p.q, p.kv.k_cache, p.kv.v_cache, out, lse, 0.125)
        cpu_variants.attend(call)
        results.append((out, lse))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_natural_lse():
    p, values = make(MIXED, sinks=True)
    attention = BatchAttention(p.spec, device="cpu")
    attention.plan(p.batch, num_tokens=p.q.shape[0])
    _, lse = attention.run(p.q, p.kv, **values)
    _, natural = attention.run(p.q, p.kv, lse_base="e", **values)
    _, natural_too = octavo.attend(p.q, p.kv, p.batch, lse_base="e", **values)
    torch.testing.assert_close(natural, lse * math.log(2))
    assert torch.equal(natural, natural_too)


def test_compiled_variants_are_eager(monkeypatch):
    # Dynamo cannot trace jaxtyping's checks.
    for name in ("pack_batch", "is_traced", "variant_options"):
        monkeypatch.setattr(octavo.ops, name, inspect.unwrap(getattr(octavo.ops, name)))
    p, values = make(replace(MIXED, padding=0), **VARIANTS["all causal"])
    chosen = arguments(p.spec, values)

    def layer(q, k, v):
        return octavo.attend(q * 2, PagedKV(k, v), p.batch, **chosen)

    inputs = (p.q, p.kv.k_cache, p.kv.v_cache)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")(*inputs)
    for got, expected in zip(compiled, layer(*inputs), strict=True):
        torch.testing.assert_close(got, expected)


def test_opcheck_with_variants():
    p, values = make(replace(MIXED, padding=0), **VARIANTS["all masked"])
    batch = octavo.ops.pack_batch(p.batch.with_mask_indptr(p.spec.page_size))
    options = octavo.ops.variant_options(p.spec, Extras(**values), p.q)
    inputs = (p.q, p.kv.k_cache.nan_to_num(0.0), p.kv.v_cache.nan_to_num(0.0), batch, None, None, p.spec.default_scale)
    torch.library.opcheck(torch.ops.octavo.attention.default, inputs, options)
    for got, expected in zip(
        octavo.ops.attention(*inputs, **options),
        octavo.attend(p.q, p.kv, p.batch, **arguments(p.spec, values)),
        strict=True,
    ):
        assert torch.equal(got, expected)


def test_plain_calls_look_at_no_variant(monkeypatch):
    def never(*given, **options):
        raise AssertionError("a plain call came here")

    for name in ("spec_fields", "look_of_variants"):
        monkeypatch.setattr(octavo.api, name, never)
    monkeypatch.setattr(octavo.batch_attention, "check_extras", never)
    monkeypatch.setattr(cpu_variants, "attend", never)
    p = build(MIXED)
    octavo.attend(p.q, p.kv, p.batch)
    attention = BatchAttention(p.spec, device="cpu")
    attention.plan(p.batch, num_tokens=p.q.shape[0])
    attention.run(p.q, p.kv)


BAD_SPECS = {
    "window_left": (-2, 1.5, True),
    "window_right": (3, -2),
    "logits_soft_cap": (-1.0, math.nan, math.inf, "1"),
    "sinks": (1, torch.zeros(4)),
    "kv_dtype": (torch.int8,),
}


@pytest.mark.parametrize(("name", "value"), [(n, x) for n, xs in BAD_SPECS.items() for x in xs], ids=str)
def test_bad_specs(name, value):
    with pytest.raises((ValueError, TypeError), match=f"{name}: expected .*; fix: "):
        AttentionSpec(4, 2, 64, **{name: value})


BAD_VALUES = {
    "sinks": (torch.zeros(3), torch.zeros(4, dtype=FP16), 1.0),
    "alibi_slopes": (torch.zeros(4, 1),),
    "k_scale": (1.0,),
    "lse_base": (10, "2"),
    "sink": (torch.zeros(4),),
}


@pytest.mark.parametrize(("name", "value"), [(n, x) for n, xs in BAD_VALUES.items() for x in xs], ids=str)
def test_bad_values(name, value):
    p = build(MIXED)
    with pytest.raises((ValueError, TypeError), match=f"{name}: expected .*; fix: "):
        octavo.attend(p.q, p.kv, p.batch, **{name: value})


def test_spec_and_call_must_agree():
    p = build(MIXED)
    attention = BatchAttention(replace(p.spec, sinks=True), device="cpu")
    attention.plan(p.batch, num_tokens=p.q.shape[0])
    with pytest.raises(ValueError, match="sinks: expected a tensor"):
        attention.run(p.q, p.kv)
    with pytest.raises(ValueError, match="batch: expected a mask"):
        BatchAttention(replace(p.spec, custom_mask=True), device="cpu").plan(p.batch)
    with pytest.raises(ValueError, match="custom_mask: expected q_len x kv_len"):
        octavo.attend(p.q, p.kv, p.batch.with_mask(torch.ones(5, dtype=torch.bool)))
    with pytest.raises(TypeError, match="custom_mask: expected bool"):
        p.batch.with_mask(torch.ones(5))


def test_plain_specs_read_as_before():
    spec = AttentionSpec(4, 2, 64, kv_dtype=torch.bfloat16)
    assert spec.is_plain and spec.variants == () and "window" not in repr(spec)
    assert replace(spec, window_left=3, sinks=True).variants == ("window_left", "sinks")
    assert "window_left=3" in repr(replace(spec, window_left=3))
    assert PagedBatch.__dataclass_fields__["kv_lens"].default is None
