"""Portable Triton backend: launchers for every GPU that Triton serves, and for its interpreter."""

import functools
import importlib.util

import torch

from octavo.backends.arch import arch_of
from octavo.backends.base import AttentionCall
from octavo.backends.constants import (
    APPEND_TOKENS,
    INLINE_SEQUENCES,
    ITEMS_AT_ONCE,
    MERGE_ROWS,
    OWN_SEQUENCES,
    append_constants,
    merge_constants,
    plan_options,
)
from octavo.backends.launch import Launcher, alignment, on_device_of
from octavo.backends.portable import DEFAULT_TUNING, Tuning, launch_inline, launch_list, planned, table_of
from octavo.planning.form import PlanForm, needs_small_list, plan_words
from octavo.planning.schedule import max_items, max_tiles
from octavo.planning.tiles import LARGE_ROWS, MEDIUM_ROWS, SMALL_ROWS, rows_per_tile
from octavo.problem import Arch, AttentionSpec, PagedBatch
from octavo.shapes import Tensor

MAX_WRITERS = 256
MIN_CAPABILITY = 80
INTERPRETED_SMS = 4  # so that the interpreter, too, has work to share out
SHORT_KEYS = 2048  # tiles of few rows read the same keys again and again: up to so many that hardly costs
INLINE_ROUNDS = 4  # tiles per worker up to which every program rather finds its own item

PLAN = Launcher("octavo.kernels.plan", "plan_kernel")
APPEND = Launcher("octavo.kernels.append", "append_kernel")
MERGE = Launcher("octavo.kernels.merge", "merge_kernel")


class TritonBackend:
    name = "triton"

    def __init__(self, tuning: Tuning = DEFAULT_TUNING) -> None:
        self.tuning = tuning

    def reject(self, spec: AttentionSpec | None, arch: Arch) -> str | None:
        if arch.kind == "cpu":
            return "tensors are on the CPU (Triton's interpreter runs there with TRITON_INTERPRET=1)"
        if importlib.util.find_spec("triton") is None:
            return "Triton is not installed"
        if arch.kind == "cuda" and arch.sm < MIN_CAPABILITY:
            return f"needs compute capability 8.0, {arch.name} has {arch.capability[0]}.{arch.capability[1]}"
        return None

    def block_m(self, spec: AttentionSpec, num_tokens: int, num_sequences: int) -> int:
        """Rows of a tile in the main list."""
        return rows_per_tile(spec, num_tokens, num_sequences)

    def workers(self, spec: AttentionSpec, block_m: int, arch: Arch) -> int:
        """Programs that work at a time on tiles of block_m rows; 0 where their kernel takes no parts of tiles."""
        sms = INTERPRETED_SMS if arch.kind == "interpreter" else arch.num_sms
        tuning = self.tuning
        programs = {SMALL_ROWS: tuning.small_programs, MEDIUM_ROWS: tuning.medium_programs}
        return sms * programs.get(block_m, tuning.large_programs)

    def plan_form(
        self, spec: AttentionSpec, num_tokens: int, batch: PagedBatch, arch: Arch, batch_invariant: bool = False
    ) -> PlanForm:
        # Keys that one sequence may have, as far as shapes tell.
        max_keys = batch.page_table.shape[-1] * spec.page_size
        if batch_invariant:
            block_m = self.block_m(spec, LARGE_ROWS, 1)
            return self.form(spec, block_m, 0 if block_m == SMALL_ROWS else SMALL_ROWS, arch, True)
        short, whole = max_keys <= SHORT_KEYS, max_keys <= self.tuning.split.least_keys
        return _choose_form(self, spec, num_tokens, batch.num_sequences, (short, whole), arch)

    def form(
        self, spec: AttentionSpec, block_m: int, small_m: int, arch: Arch, batch_invariant: bool = False
    ) -> PlanForm:
        workers = self.workers(spec, block_m, arch)
        small_workers = self.workers(spec, small_m, arch) if small_m else 0
        return PlanForm(block_m, small_m, workers, small_workers, int(batch_invariant))

    def plan_words(self, spec: AttentionSpec, num_tokens: int, num_sequences: int, form: PlanForm) -> int:
        return _plan_words(spec, num_tokens, num_sequences, form, self.tuning)

    def max_plan_words(
        self, spec: AttentionSpec, num_tokens: int, num_sequences: int, arch: Arch, batch_invariant: bool = False
    ) -> int:
        """The most that plan_words says for any form that a batch of at most this size gets."""
        rows = {SMALL_ROWS, *(self.block_m(spec, tokens, 1) for tokens in (1, *range(16, LARGE_ROWS, 16), 4096))}
        forms = [self.form(spec, m, SMALL_ROWS if m > SMALL_ROWS else 0, arch, batch_invariant) for m in rows]
        return max(self.plan_words(spec, num_tokens, num_sequences, form) for form in forms)

    def plan(self, spec: AttentionSpec, batch: PagedBatch, num_tokens: int, form: PlanForm, plan: Tensor) -> None:
        arch = arch_of(plan.device)
        constants, config, layout = planned(spec, form, self.tuning, arch, batch.is_dense, plan.numel())
        programs = -(-(batch.num_sequences + 1) // OWN_SEQUENCES)
        items = min(max_items(spec, num_tokens, batch.num_sequences, config), layout.capacity)
        writers = max(1, min(-(-items // (programs * ITEMS_AT_ONCE)), MAX_WRITERS))
        table = table_of(batch)
        dtypes = tuple(None if x is None else x.dtype for x in table[:3])
        key = (spec, form, self.tuning, plan.device, dtypes, batch.is_dense)
        rooms = (layout.capacity, layout.states, layout.small_states)
        arguments = (plan, *table, num_tokens, batch.num_sequences, *rooms)
        with on_device_of(plan):
            PLAN((programs, writers, 1), key, arguments, {"C": constants}, plan_options(arch))

    def attend(self, call: AttentionCall) -> None:
        num_tokens, batch, form = call.q.shape[0], call.batch, call.form
        if num_tokens == 0:
            return
        if call.scale_tensor is None and call.sm_scale < 0:
            # The kernel takes a scale that it need not look at; -q is exact.
            call = call._replace(q=-call.q, sm_scale=-call.sm_scale)
        if form is None:
            form = self.plan_form(call.spec, num_tokens, batch, arch_of(call.q.device))
            call = call._replace(form=form)
        plan = call.plan
        if plan is None:
            if self._attends_inline(call, form):
                launch_inline(call, form, self.tuning)
                return
            words = self.plan_words(call.spec, num_tokens, batch.num_sequences, form)
            plan = torch.empty(words, dtype=torch.int32, device=call.q.device)
            self.plan(call.spec, batch, num_tokens, form, plan)
        self.attend_tiles(call, plan, form.block_m)
        if form.small_m:
            self.attend_list(call, plan, form.small_m)

    def attend_tiles(self, call: AttentionCall, plan: Tensor, block_m: int) -> None:
        """Attention over the main list of a plan, whose tiles have block_m rows."""
        self.attend_list(call, plan, block_m)

    def attend_list(self, call: AttentionCall, plan: Tensor, block_m: int) -> None:
        """The portable kernel over the list of a plan whose tiles have block_m rows."""
        launch_list(call, plan, block_m, self.tuning)

    def _attends_inline(self, call: AttentionCall, form: PlanForm) -> bool:
        """Whether every program of a small batch rather finds its own item than have them planned before."""
        sequences = call.batch.num_sequences
        if not self.tuning.inline or form.small_m or form.block_m != SMALL_ROWS or sequences >= INLINE_SEQUENCES:
            return False
        tiles = max_tiles(call.spec, call.q.shape[0], sequences, SMALL_ROWS)
        return tiles <= INLINE_ROUNDS * self.workers(call.spec, SMALL_ROWS, arch_of(call.q.device))

    def append(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch) -> None:
        num_tokens, num_heads, head_dim = k.shape
        if num_tokens == 0 or num_heads == 0:
            return
        table = table_of(batch)
        strides = (k.stride()[:2], v.stride()[:2], k_cache.stride()[:3], v_cache.stride()[:3])
        steps = batch.num_sequences.bit_length() + 1
        counts = (num_tokens, batch.num_sequences, k_cache.shape[0], steps)
        arguments = (k, v, k_cache, v_cache, *table[:3], batch.page_table, *table[3:], *counts, *strides)
        constants = append_constants(k_cache.shape[1], head_dim, v.shape[2], batch.is_dense)
        dtypes = (k.dtype, batch.page_table.dtype, *(None if x is None else x.dtype for x in table[:3]))
        key = (tuple(constants.values()), dtypes, strides, alignment(k, v, k_cache, v_cache), k.device)
        with on_device_of(k):
            APPEND((-(-num_tokens // APPEND_TOKENS), num_heads, 1), key, arguments, constants)

    def merge(self, outs: list[Tensor], lses: list[Tensor], out: Tensor, lse: Tensor) -> None:
        num_tokens, num_heads, dim = out.shape
        num_rows = num_tokens * num_heads
        if num_rows == 0:
            return
        strides = (tuple(x.stride()[:2] for x in outs), tuple(x.stride() for x in lses), out.stride()[:2], lse.stride())
        arguments = (tuple(outs), tuple(lses), out, lse, *strides, num_rows)
        constants = merge_constants(num_heads, dim)
        key = (dim, out.dtype, strides, alignment(*outs, *lses, out, lse), out.device)
        with on_device_of(out):
            MERGE((-(-num_rows // MERGE_ROWS), 1, 1), key, arguments, constants)


@functools.lru_cache(maxsize=4096)
def _choose_form(
    backend: TritonBackend,
    spec: AttentionSpec,
    num_tokens: int,
    num_sequences: int,
    keys: tuple[bool, bool],
    arch: Arch,
) -> PlanForm:
    """keys: whether every sequence is short enough for many tiles, and too short to be cut."""
    short, whole = keys
    block_m = backend.block_m(spec, num_tokens, num_sequences)
    tiles = max_tiles(spec, num_tokens, num_sequences, SMALL_ROWS)
    if tiles <= backend.workers(spec, SMALL_ROWS, arch) and short:
        # Tiles of few rows, which are many, all run at once, and are done soonest.
        block_m = SMALL_ROWS
    small = needs_small_list(spec, num_tokens, num_sequences, block_m)
    form = backend.form(spec, block_m, SMALL_ROWS if small else 0, arch)
    if whole:
        return form._replace(workers=0, small_workers=0)
    return form


@functools.lru_cache(maxsize=4096)
def _plan_words(spec: AttentionSpec, num_tokens: int, num_sequences: int, form: PlanForm, tuning: Tuning) -> int:
    return plan_words(spec, num_tokens, num_sequences, tuning.config(form))
