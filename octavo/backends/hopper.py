"""Launcher of the sm_90 kernel. Short rows, and what the kernel does not take, go to the portable one."""

import functools
import importlib.util
import math
import warnings

import torch

from octavo.backends.arch import arch_of
from octavo.backends.base import AttentionCall
from octavo.backends.launch import Launch, Launcher, alignment, current_stream
from octavo.backends.portable import planned
from octavo.backends.runs import ListRunner
from octavo.backends.tensor_maps import RUNS_NEVER, TensorMaps, box_rows, run_form
from octavo.backends.triton import TritonBackend
from octavo.planning.form import PlanForm, PlanLayout
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
NEAR_MAPS = 1024  # found by address alone: a model's layers

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

    def main_run(self, call: AttentionCall, form: PlanForm, words: int) -> ListRunner:
        if form.block_m != LARGE_ROWS or not _is_addressable(call):
            return super().main_run(call, form, words)
        arch = arch_of(call.q.device)
        _, config, layout = planned(call.spec, form, self.tuning, arch, call.batch.is_dense, words)
        return HopperRun(call, layout, config.split.cuts)


def _not_served(spec: AttentionSpec) -> str | None:
    if not spec.is_plain:
        return f"needs a plain spec, got {', '.join(spec.variants)}"
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


class HopperRun:
    """The kernel over the main list of a plan, for calls that look like `call`."""

    def __init__(self, call: AttentionCall, layout: PlanLayout, cuts: bool) -> None:
        q, k_cache, v_cache, out, lse = call.q, call.k_cache, call.v_cache, call.out, call.lse
        self._spec, self._cuts, self._scaled = call.spec, cuts, call.scale_tensor is not None
        self._key = (call.spec, cuts, call.batch.page_table.dtype, self._scaled, q.device)
        runs = run_form(k_cache)
        self._runs = runs if runs == run_form(v_cache) else RUNS_NEVER
        self._grid = (min(arch_of(q.device).num_sms, layout.capacity), 1, 1)
        strides = (*q.stride()[:2], *_cache_strides(k_cache), *_cache_strides(v_cache), *out.stride()[:2])
        units = [stride // UNIT for stride in strides]
        counts = (q.shape[0], k_cache.shape[0], layout.capacity, layout.states)
        self._rest = (*counts, *units, *lse.stride())
        self._forms: dict[int, Launch] = {}
        self._maps: dict[tuple[int, int, int], Tensor] = {}

    def __call__(self, call: AttentionCall, plan: Tensor) -> None:
        maps = self._find_maps(call.k_cache, call.v_cache) if self._runs != RUNS_NEVER else None
        runs = RUNS_NEVER if maps is None else self._runs
        scale_log2 = call.sm_scale * LOG2_E
        if not self._scaled:
            # A masked score, -inf, times 0 would be NaN; the scale is not negative.
            scale_log2 = max(scale_log2, TINY_SCALE)
        tensors = (call.q, call.k_cache, call.v_cache, call.out, call.lse, plan, call.batch.page_table)
        scale = (call.scale_tensor, plan if maps is None else maps, scale_log2)
        launch = self._forms.get(runs) or self._form(runs)
        launch(self._grid, (*tensors, *scale, *self._rest))

    def _find_maps(self, k_cache: Tensor, v_cache: Tensor) -> Tensor | None:
        place = k_cache.data_ptr(), v_cache.data_ptr(), current_stream(k_cache.get_device())
        maps = self._maps.get(place)
        if maps is None:
            maps = MAPS.find(k_cache, v_cache, self._runs)
            if maps is not None and len(self._maps) < NEAR_MAPS:
                self._maps[place] = maps
        return maps

    def _form(self, runs: int) -> Launch:
        form = self._forms[runs] = ATTENTION.form((self._key, runs), *attention_constants(self._spec, runs, self._cuts))
        return form


def _cache_strides(cache: Tensor) -> tuple[int, int, int]:
    """(page, key in page, head), where keys of a page_size of 1 follow each other at the distance of pages."""
    page, token, head, _ = cache.stride()
    return page, page if cache.shape[1] == 1 else token, head
