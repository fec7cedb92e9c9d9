"""The trace_apply hook on a stand-in for FlashInfer: what is routed, and what is left to FlashInfer."""

import functools
import sys
import types
from dataclasses import replace

import pytest
import torch
from inputs import FP16, Case, build
from tolerance import assert_matches

from octavo.integrations import flashinfer_trace

PREFILL = "gqa_paged_prefill_h4_kv2_d64_ps4"
DECODE = "gqa_paged_decode_h4_kv2_d64_ps4"
THEIRS = "served by FlashInfer"


class Wrapper:
    """As FlashInfer's keep a plan: tables and options in these attributes."""

    def __init__(self, p, **changes):
        plain = {"_causal": p.spec.causal, "_window_left": -1, "_logits_soft_cap": None, "_kv_layout": "NHD"}
        plain |= {"_pos_encoding_mode": "NONE", "_sm_scale": p.sm_scale, "_custom_mask_buf": None}
        b = p.batch
        plain |= {"_qo_indptr_buf": b.qo_indptr, "_paged_kv_indptr_buf": b.kv_indptr}
        plain |= {"_paged_kv_indices_buf": b.page_table, "_paged_kv_last_page_len_buf": b.last_page_len}
        vars(self).update(plain | changes)

    def run(self, q, paged_kv_cache, *args, return_lse=False, out=None, **options):
        return THEIRS


def fake_trace_apply(patched):
    """enable_apply and disable_apply as in FlashInfer 0.6.18: names of constant axes alone, keywords, strict."""
    module = types.ModuleType("flashinfer.trace_apply")

    def name_of(prefix, q, k_cache):
        return f"{prefix}_h{q.shape[1]}_kv{k_cache.shape[2]}_d{q.shape[2]}_ps{k_cache.shape[1]}"

    def enable_apply(mapping):
        module.disable_apply()
        for prefix, cls in patched.items():
            original = cls.run

            @functools.wraps(original)
            def run(self, q, paged_kv_cache, *args, _original=original, _prefix=prefix, **options):
                k_cache, v_cache = paged_kv_cache
                solution = mapping.get(name_of(_prefix, q, k_cache))
                if solution is None:
                    return _original(self, q, paged_kv_cache, *args, **options)
                given = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "kv_indptr": torch.zeros(1)}
                made = solution(**given, return_lse=options.get("return_lse", False))
                buffer = options.get("out")
                return made if buffer is None else buffer.copy_(made)

            module.originals.append((cls, original))
            cls.run = run
        return len(patched)

    def disable_apply():
        while module.originals:
            cls, original = module.originals.pop()
            cls.run = original

    module.originals, module.enable_apply, module.disable_apply = [], enable_apply, disable_apply
    return module


@pytest.fixture
def classes(monkeypatch):
    """The two wrapper classes of a stand-in package."""
    made = {kind: type(name, (Wrapper,), {"run": Wrapper.run}) for kind, (_, name) in flashinfer_trace.WRAPPERS.items()}
    for kind, (module_name, name) in flashinfer_trace.WRAPPERS.items():
        module = types.ModuleType(module_name)
        setattr(module, name, made[kind])
        monkeypatch.setitem(sys.modules, module_name, module)
    monkeypatch.setitem(sys.modules, "flashinfer", types.ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.trace_apply", fake_trace_apply(made))
    return made[flashinfer_trace.PREFILL], made[flashinfer_trace.DECODE]


CASE = Case("trace", (3, 0, 1, 5), (20, 7, 33, 18), page_size=4, dtype=FP16, padding=2)
ONE_EACH = replace(CASE, qo_lens=(1, 1, 1, 1), padding=0)


def cache_of(p):
    return p.kv.k_cache, p.kv.v_cache


def test_prefill_and_decode_are_served(classes):
    prefill, decode = classes
    assert flashinfer_trace.enable(PREFILL, DECODE) == 2
    for cls, case in ((prefill, CASE), (decode, ONE_EACH)):
        for scale in (None, 0.25):
            p = replace(build(case), sm_scale=scale)
            out, lse = cls(p).run(p.q, cache_of(p), return_lse=True)
            assert_matches(p, out, lse)
        buffer = torch.empty_like(p.q)
        assert torch.equal(cls(p).run(p.q, cache_of(p), out=buffer), out) and torch.equal(buffer, out)


PLANNED_OTHERWISE = {
    "not causal": {"_causal": False},
    "window": {"_window_left": 7},
    "soft-cap": {"_logits_soft_cap": 30.0},
    "rope": {"_pos_encoding_mode": "ROPE_LLAMA"},
    "mask": {"_custom_mask_buf": torch.ones(1)},
    "HND": {"_kv_layout": "HND"},
    "custom kernel": {"_jit_module": object()},
    "items": {"_prefix_len_ptr": torch.ones(1)},
    "tables on the host of another device": {"_qo_indptr_buf": None},
}


@pytest.mark.parametrize("name", PLANNED_OTHERWISE)
def test_other_plans_are_left_to_flashinfer(classes, name):
    prefill, _ = classes
    p = build(CASE)
    flashinfer_trace.enable(PREFILL)
    assert prefill(p, **PLANNED_OTHERWISE[name]).run(p.q, cache_of(p)) == THEIRS


def test_plans_of_a_version_that_keeps_them_elsewhere_are_left(classes):
    prefill, _ = classes
    p = build(CASE)
    flashinfer_trace.enable(PREFILL)
    for name in ("_causal", "_window_left", "_sm_scale", "_paged_kv_indices_buf"):
        wrapper = prefill(p)
        delattr(wrapper, name)
        assert wrapper.run(p.q, cache_of(p)) == THEIRS


def test_other_calls_are_left_to_flashinfer(classes):
    prefill, decode = classes
    p = build(CASE)
    flashinfer_trace.enable(PREFILL, DECODE)
    cache = cache_of(p)
    for options in ({"v_scale": 2.0}, {"k_scale": torch.ones(1)}, {"sinks": torch.ones(4)}, {"window_left": 3}):
        assert prefill(p).run(p.q, cache, **options) == THEIRS
    assert prefill(p).run(p.q, cache, torch.ones(4)) == THEIRS
    assert prefill(p).run(p.q, torch.stack(cache, 1)) == THEIRS
    assert prefill(p).run(p.q.float(), cache) == THEIRS
    assert prefill(p).run(p.q, tuple(x.to(torch.float8_e4m3fn) for x in cache)) == THEIRS
    assert decode(p, _q_len_per_req=2).run(p.q, cache) == THEIRS
    assert not isinstance(prefill(p).run(p.q, cache, v_scale=1.0, window_left=-1), str)
    other = build(replace(CASE, heads=(4, 4)))
    assert prefill(other).run(other.q, cache_of(other)) == THEIRS


def test_enabling_again_and_disabling(classes):
    prefill, decode = classes
    original = prefill.run
    p = build(CASE)
    theirs = {DECODE: lambda **given: "another solution"}
    for _ in range(2):
        flashinfer_trace.enable(PREFILL, others=theirs)
        assert not isinstance(prefill(p).run(p.q, cache_of(p)), str)
    one = build(ONE_EACH)
    assert decode(one).run(one.q, cache_of(one)) == "another solution"
    flashinfer_trace.disable()
    assert prefill.run is original and prefill(p).run(p.q, cache_of(p)) == THEIRS


def test_trace_apply_alone_cannot_tell_and_says_so(classes):
    solutions = flashinfer_trace.solutions(PREFILL, DECODE)
    p = build(CASE)
    for solution in solutions.values():
        with pytest.raises(RuntimeError, match="enable"):
            solution(q=p.q, k_cache=p.kv.k_cache, v_cache=p.kv.v_cache)


def test_wrong_names(classes):
    with pytest.raises(ValueError, match="gqa_paged_prefill"):
        flashinfer_trace.solutions("rmsnorm_h4096")
    with pytest.raises(ValueError, match="gqa_ragged"):
        flashinfer_trace.enable("gqa_ragged_h4_kv2_d64")


def test_flashinfer_is_not_installed(monkeypatch):
    for name in ("flashinfer", "flashinfer.trace_apply"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match="flashinfer-python"):
        flashinfer_trace.enable(PREFILL)
