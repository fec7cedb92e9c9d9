"""Launcher of the sm_90 kernel. Short rows, and what the kernel does not take, go to the portable one."""

import functools
import importlib.util
import math
import warnings

import torch

from octavo.backends.arch import arch_of
from octavo.backends.base import AttentionCall
from octavo.backends.launch import Launcher, alignment, on_device_of
from octavo.backends.portable import planned
from octavo.backends.tensor_maps import RUNS_NEVER, TensorMaps, box_rows, run_form
from octavo.backends.triton import TritonBackend
from octavo.planning.form import PlanLayout
from octavo.planning.tiles import LARGE_ROWS, SMALL_ROWS
from octavo.problem import Arch, AttentionSpec
from octavo.shapes import Tensor

HEAD_DIMS = (64, 128, 256)
CUT_HEAD_DIM = 128  # the longest whose tiles may be cut: combining the parts of longer ones takes too many registers
DTYPES = (torch.bfloat16, torch.float16)
UNIT = 8  # elements in 16 bytes, in which the kernel counts
MAX_UNITS, MAX_ROWS = 1 << 32, 1 << 31
LOG2_E = math.log2(math.e)
TINY_SCALE = 2.0**-100

ATTENTION = Launcher("octavo.kernels.attention_hopper", "attention_hopper_kernel")
MAPS = TensorMaps()


class HopperBackend(TritonBackend):
    """As the portable backend, but for tiles of 128 rows."""

    name = "hopper"

    def reject(self, spec: AttentionSpec | None, arch: Arch) -> str | None:
        if arch.kind != "cuda" or arch.sm != 90:
            return f"needs compute capability 9.0, {arch.name} is another device"
        reason = super().reject(spec, arch)
        if reason is None and spec is not None:
            reason = _not_served(spec) or compile_failure(spec)
        return reason

    def block_m(self, spec: AttentionSpec, num_tokens: int, num_sequences: int) -> int:
        rows = super().block_m(spec, num_tokens, num_sequences)
        return rows if rows == SMALL_ROWS else LARGE_ROWS

    def workers(self, spec: AttentionSpec, block_m: int, arch: Arch) -> int:
        if block_m == LARGE_ROWS and spec.head_dim > CUT_HEAD_DIM:
            return 0
        return super().workers(spec, block_m, arch)

    def attend_tiles(self, call: AttentionCall, plan: Tensor, block_m: int) -> None:
        if block_m == LARGE_ROWS and _is_addressable(call):
            assert call.form is not None
            arch, dense = arch_of(call.q.device), call.batch.is_dense
            _, config, layout = planned(call.spec, call.form, self.tuning, arch, dense, plan.numel())
            _launch(call, plan, layout, config.split.cuts)
        else:
            super().attend_tiles(call, plan, block_m)


def _not_served(spec: AttentionSpec) -> str | None:
    if spec.head_dim not in HEAD_DIMS or spec.v_dim != spec.head_dim:
        return f"needs head_dim and value_dim alike, one of {HEAD_DIMS}, got {spec.head_dim} and {spec.v_dim}"
    if spec.dtype not in DTYPES:
        return f"needs bfloat16 or float16, got {spec.dtype}"
    return None


@functools.lru_cache(maxsize=64)
def compile_failure(spec: AttentionSpec) -> str | None:
    """Why this Triton does not compile the kernel, with one warning, or None. Triton keeps what it compiled on disk."""
    if importlib.util.find_spec("triton.experimental.gluon") is None:
        return "this Triton has no Gluon"
    from octavo.backends.catalog import hopper_build

    try:
        hopper_build(spec, RUNS_NEVER).compile(90)
    except Exception as error:  # Whatever the compiler raises, it is the reason.
        lines = str(error).strip().splitlines() or [""]
        reason = f"this Triton does not compile it: {type(error).__name__}: {lines[-1]}"
    else:
        return None
    warnings.warn(f"octavo: the sm_90 kernel is off, the portable one serves: {reason}", RuntimeWarning, stacklevel=2)
    return reason


def _is_addressable(call: AttentionCall) -> bool:
    """Whether the kernel's 32-bit offsets, in 16 bytes, reach all of the call's tensors, and copies of 16 bytes fit."""
    tensors = (call.q, call.k_cache, call.v_cache, call.out)
    if call.k_cache.shape[0] == 0 or alignment(*tensors):
        return False
    for x in tensors:
        # The stride of a dimension of one element is never used.
        used = [(n - 1, stride) for n, stride in zip(x.shape[:-1], x.stride(), strict=False) if n > 1]
        if any(stride % UNIT for _, stride in used) or sum(n * stride for n, stride in used) >= MAX_UNITS * UNIT:
            return False
    pages, page_size, _, _ = call.k_cache.shape
    lse_span = (call.lse.shape[0] - 1) * call.lse.stride(0) + (call.lse.shape[1] - 1) * call.lse.stride(1)
    return pages * page_size < MAX_ROWS and lse_span < MAX_ROWS


@functools.lru_cache(maxsize=256)
def attention_constants(spec: AttentionSpec, runs: int, cuts: bool = False) -> tuple[dict[str, int], dict[str, int]]:
    """(constexprs, compiler options) of the sm_90 kernel."""
    wide = spec.head_dim == 256
    constants = {
        "GROUP": spec.group_size,
        "D": spec.head_dim,
        "PAGE_SIZE": spec.page_size,
        "CAUSAL": spec.causal,
        "RUNS": runs,
        "BOX_ROWS": box_rows(spec.page_size),
        "BLOCK_N": 64 if wide else 128,
        "SLOTS": 1 if wide else 2,
        "STAGES": 2,
        "FENCE": False,
        "CUTS": cuts,
        "ATTEND_REGISTERS": 232 if wide else 216,
        "LOAD_REGISTERS": 40 if wide else 72,
    }
    return constants, {"num_warps": 4, "enable_fp_fusion": True}


def _launch(call: AttentionCall, plan: Tensor, layout: PlanLayout, cuts: bool) -> None:
    q, k_cache, v_cache, out, lse, table = call.q, call.k_cache, call.v_cache, call.out, call.lse, call.batch.page_table
    with on_device_of(q):
        runs = run_form(k_cache)
        runs = runs if runs == run_form(v_cache) else RUNS_NEVER
        maps = MAPS.find(k_cache, v_cache, runs) if runs != RUNS_NEVER else None
        runs = RUNS_NEVER if maps is None else runs
        strides = (*q.stride()[:2], *_cache_strides(k_cache), *_cache_strides(v_cache), *out.stride()[:2])
        units = [stride // UNIT for stride in strides]
        scale_log2 = call.sm_scale * LOG2_E
        if call.scale_tensor is None:
            # A masked score, -inf, times 0 would be NaN; the backend has made the scale positive.
            scale_log2 = max(scale_log2, TINY_SCALE)
        scale = (call.scale_tensor, plan if maps is None else maps, scale_log2)
        counts = (q.shape[0], k_cache.shape[0], layout.capacity, layout.states, *units, *lse.stride())
        arguments = (q, k_cache, v_cache, out, lse, plan, table, *scale, *counts)
        constants, options = attention_constants(call.spec, runs, cuts)
        key = (call.spec, runs, cuts, table.dtype, call.scale_tensor is None, q.device)
        ATTENTION((min(arch_of(q.device).num_sms, layout.capacity), 1, 1), key, arguments, constants, options)


def _cache_strides(cache: Tensor) -> tuple[int, int, int]:
    """(page, key in page, head), where keys of a page_size of 1 follow each other at the distance of pages."""
    page, token, head, _ = cache.stride()
    return page, page if cache.shape[1] == 1 else token, head
