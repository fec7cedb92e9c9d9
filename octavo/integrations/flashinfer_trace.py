"""Octavo behind FlashInfer's paged wrappers in a running engine, through flashinfer.trace_apply.

    from octavo.integrations import flashinfer_trace

    flashinfer_trace.enable("gqa_paged_prefill_h32_kv8_d128_ps16", "gqa_paged_decode_h32_kv8_d128_ps16")

trace_apply routes by a definition's name, in which there is no mask: calls that are not causal, have windows, scales or
other variants come under the same name, and the callable is not told. `enable` therefore puts a guard around the
wrappers' `run`, which looks at what was planned and lets FlashInfer serve what the definition does not mean.
"""

import contextvars
import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from octavo.api import run
from octavo.compat.arguments import is_one, positions
from octavo.errors import fail
from octavo.shapes import Tensor

PREFILL, DECODE = "gqa_paged_prefill", "gqa_paged_decode"
WRAPPERS = {
    PREFILL: ("flashinfer.prefill", "BatchPrefillWithPagedKVCacheWrapper"),
    DECODE: ("flashinfer.decode", "BatchDecodeWithPagedKVCacheWrapper"),
}
UNSEEN_OPTIONS = ("sinks", "kv_cache_sf", "skip_softmax_threshold_scale_factor")
DTYPES = (torch.bfloat16, torch.float16)


class Plan(NamedTuple):
    """A wrapper's tables on the device, which its plan() keeps up to date, graphs included."""

    kv_indptr: Tensor
    kv_indices: Tensor
    last_page_len: Tensor
    qo_indptr: Tensor | None
    sm_scale: float | None


_PLAN: contextvars.ContextVar[Plan | None] = contextvars.ContextVar("octavo_flashinfer_plan", default=None)


def solutions(*names: str) -> dict[str, Callable[..., Any]]:
    """What `flashinfer.trace_apply.enable_apply` takes: a callable for each definition's name.

    Args:
        names: gqa_paged_prefill_h<qo heads>_kv<kv heads>_d<head_dim>_ps<page_size>, or gqa_paged_decode_....

    Raises:
        ValueError: a name of another definition.
    """
    made = {}
    for name in names:
        kind = next((kind for kind in WRAPPERS if name.startswith(f"{kind}_")), None)
        if kind is None:
            fail("name", f"{PREFILL}_… or {DECODE}_…", repr(name), "gqa_paged_prefill_h32_kv8_d128_ps16")
        made[name] = paged_prefill if kind == PREFILL else paged_decode
    return made


def enable(*names: str, others: Mapping[str, Any] | None = None) -> int:
    """Let Octavo serve these definitions; the number of FlashInfer's functions that are now routed.

    Args:
        names: as in `solutions`.
        others: further solutions of the caller's, by name: enable_apply knows one mapping at a time.

    Raises:
        ImportError: FlashInfer is not installed, or has no trace_apply (it came with 0.6.18).
    """
    mapping: dict[str, Any] = {**dict(others or {}), **solutions(*names)}
    trace_apply = _import("flashinfer.trace_apply")
    disable()
    originals = {kind: _wrapper(kind).run for kind in WRAPPERS}
    routed = int(trace_apply.enable_apply(mapping))
    for kind, original in originals.items():
        cls = _wrapper(kind)
        if cls.run is not original:
            cls.run = _guarded(kind, original, cls.run)
    return routed


def disable() -> None:
    """FlashInfer serves everything again."""
    for kind in WRAPPERS:
        routed = getattr(_wrapper(kind).run, "octavo_routed", None)
        if routed is not None:
            _wrapper(kind).run = routed
    _import("flashinfer.trace_apply").disable_apply()


def paged_prefill(
    *, q: Tensor, k_cache: Tensor, v_cache: Tensor, return_lse: bool = False, **planned: Tensor | float
) -> Any:
    """The solution of gqa_paged_prefill_…: causal attention of q [tokens, heads, dim]; out, or (out, lse) in base 2.

    `planned`, the tables and sm_scale as plan() got them, may be on the host or old: the wrapper's own are used.
    """
    plan = _plan_of_call()
    assert plan.qo_indptr is not None
    return _run(plan, plan.qo_indptr, q, (k_cache, v_cache), return_lse)


def paged_decode(
    *, q: Tensor, k_cache: Tensor, v_cache: Tensor, return_lse: bool = False, **planned: Tensor | float
) -> Any:
    """The solution of gqa_paged_decode_…: one query of each sequence, q [sequences, heads, dim]."""
    return _run(_plan_of_call(), positions(q.shape[0] + 1, q.device), q, (k_cache, v_cache), return_lse)


def _plan_of_call() -> Plan:
    plan = _PLAN.get()
    if plan is None:
        raise RuntimeError(
            "octavo: expected a call through the guard, which knows what was planned, got one from trace_apply alone; "
            "fix: octavo.integrations.flashinfer_trace.enable(...) in place of enable_apply(...)"
        )
    return plan


def _run(plan: Plan, qo_indptr: Tensor, q: Tensor, cache: tuple[Tensor, Tensor], return_lse: bool) -> Any:
    tables = (qo_indptr, plan.kv_indptr, plan.kv_indices)
    out, lse = run(q, *cache, *tables, plan.sm_scale, last_page_len=plan.last_page_len)
    return (out, lse) if return_lse else out


def _guarded(kind: str, original: Callable[..., Any], routed: Callable[..., Any]) -> Callable[..., Any]:
    """`run` of a wrapper: routed where the call is what the definition means, else FlashInfer's own."""

    @functools.wraps(original)
    def guarded(self: Any, q: Tensor, paged_kv_cache: Any, *args: Any, **options: Any) -> Any:
        plan = plan_if_plain(kind, self, q, paged_kv_cache, args, options)
        if plan is None:
            return original(self, q, paged_kv_cache, *args, **options)
        token = _PLAN.set(plan)
        try:
            return routed(self, q, paged_kv_cache, **options)
        finally:
            _PLAN.reset(token)

    guarded.octavo_routed = routed  # type: ignore[attr-defined]
    return guarded


def plan_if_plain(
    kind: str, wrapper: Any, q: Tensor, cache: Any, args: tuple[Any, ...], options: Mapping[str, Any]
) -> Plan | None:
    """The wrapper's tables if this call of `run` is the definition's: causal, and nothing else; None if it is not, or
    if this version of FlashInfer keeps its plan elsewhere."""
    window = options.get("window_left")
    scales = [options.get(name) for name in ("q_scale", "k_scale", "v_scale")]
    if args or any(options.get(name) is not None for name in UNSEEN_OPTIONS) or not all(map(is_one, scales)):
        return None
    if window not in (None, -1) or not isinstance(cache, tuple) or q.dtype not in DTYPES:
        return None
    if any(not isinstance(x, Tensor) or x.dtype != q.dtype for x in cache):
        return None
    if not _planned_plain(kind, wrapper):
        return None
    tables: list[Any] = [
        getattr(wrapper, f"_paged_kv_{name}_buf", None) for name in ("indptr", "indices", "last_page_len")
    ]
    qo_indptr = getattr(wrapper, "_qo_indptr_buf", None) if kind == PREFILL else None
    needed = tables if kind == DECODE else [*tables, qo_indptr]
    if any(not isinstance(x, Tensor) or x.device != q.device for x in needed):
        return None
    return Plan(tables[0], tables[1], tables[2], qo_indptr, wrapper._sm_scale)


def _planned_plain(kind: str, wrapper: Any) -> bool:
    """Whether plan() said causal (one query a sequence, for decode), and neither window, cap, position nor mask."""
    unknown = object()

    def planned(name: str) -> Any:
        return getattr(wrapper, name, unknown)

    window = planned("_window_left")
    plain = isinstance(window, int) and window < 0 and planned("_logits_soft_cap") in (None, 0.0)
    plain = plain and planned("_pos_encoding_mode") == "NONE" and planned("_kv_layout") == "NHD"
    plain = plain and isinstance(planned("_sm_scale"), (float, type(None)))
    own = [getattr(wrapper, name, None) for name in ("_jit_module", "_custom_mask_buf", "_prefix_len_ptr")]
    plain = plain and all(x is None for x in own)
    if kind == DECODE:
        return plain and getattr(wrapper, "_q_len_per_req", 1) in (None, 1)
    return plain and planned("_causal") is True


def _wrapper(kind: str) -> Any:
    module, name = WRAPPERS[kind]
    return getattr(_import(module), name)


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"octavo: expected {name}; fix: pip install 'flashinfer-python>=0.6.18'") from error


__all__ = ["disable", "enable", "paged_decode", "paged_prefill", "plan_if_plain", "solutions"]
