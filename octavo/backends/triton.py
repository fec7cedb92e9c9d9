"""Portable Triton backend: launchers for every GPU that Triton serves, and for its interpreter."""

import functools
import importlib.util

import torch

from octavo.backends.arch import arch_of
from octavo.backends.base import AttentionCall, Prepared
from octavo.backends.constants import APPEND_TOKENS, INLINE_SEQUENCES, MERGE_ROWS, append_constants, merge_constants
from octavo.backends.launch import Launcher, alignment
from octavo.backends.portable import DEFAULT_TUNING, InlineRun, ListRun, Tuning, table_of
from octavo.backends.runs import ListRunner, PlannedRun, PlanRun, WholeRun
from octavo.planning.form import PlanForm, keys_class, needs_small_list, plan_words
from octavo.planning.schedule import max_tiles
from octavo.planning.tiles import LARGE_ROWS, MEDIUM_ROWS, SMALL_ROWS, rows_per_tile
from octavo.problem import Arch, AttentionSpec, PagedBatch
from octavo.shapes import Tensor

MIN_CAPABILITY = 80
E4M3_CAPABILITY = 89
INTERPRETED_SMS = 4  # so that the interpreter, too, has work to share out
INLINE_ROUNDS = 4  # tiles per worker up to which every program rather finds its own item

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
        if (
            spec is not None
            and spec.kv_dtype == torch.float8_e4m3fn
            and arch.kind == "cuda"
            and arch.sm < E4M3_CAPABILITY
        ):
            return f"needs compute capability 8.9 for float8_e4m3fn, {arch.name} has {arch.sm / 10}"
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
        keys = keys_class(max_keys, self.tuning.split)
        return _choose_form(self, spec, num_tokens, batch.num_sequences, keys, arch)

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
        # As many sequences as heads in a group: then the mean rows of one are the tokens given.
        means = (SMALL_ROWS, MEDIUM_ROWS, LARGE_ROWS, 2 * LARGE_ROWS)
        rows = {SMALL_ROWS, *(self.block_m(spec, mean, spec.group_size) for mean in means)}
        forms = [self.form(spec, m, SMALL_ROWS if m > SMALL_ROWS else 0, arch, batch_invariant) for m in rows]
        return max(self.plan_words(spec, num_tokens, num_sequences, form) for form in forms)

    def prepare_plan(
        self, spec: AttentionSpec, batch: PagedBatch, num_tokens: int, form: PlanForm, words: int
    ) -> PlanRun:
        return PlanRun(spec, batch, num_tokens, form, self.tuning, words)

    def prepare(self, call: AttentionCall) -> Prepared:
        if call.q.shape[0] == 0:
            return _do_nothing
        form = call.form
        if form is None:
            form = self.plan_form(call.spec, call.q.shape[0], call.batch, arch_of(call.q.device))
        if call.plan is not None:
            return PlannedRun(self.list_runs(call, form, call.plan.numel()))
        if self._attends_inline(call, form):
            return InlineRun(call, form, self.tuning)
        num_tokens = call.q.shape[0]
        words = self.plan_words(call.spec, num_tokens, call.batch.num_sequences, form)
        plan = self.prepare_plan(call.spec, call.batch, num_tokens, form, words)
        return WholeRun(words, plan, self.list_runs(call, form, words))

    def list_runs(self, call: AttentionCall, form: PlanForm, words: int) -> list[ListRunner]:
        """How each list of a plan of so many words is attended to."""
        runs = [self.main_run(call, form, words)]
        return [*runs, ListRun(call, form, words, form.small_m, self.tuning)] if form.small_m else runs

    def main_run(self, call: AttentionCall, form: PlanForm, words: int) -> ListRunner:
        return ListRun(call, form, words, form.block_m, self.tuning)

    def attend(self, call: AttentionCall) -> None:
        if call.scale_tensor is None and call.sm_scale < 0:
            # The kernels take a scale that they need not look at; -q is exact.
            call = call._replace(q=-call.q, sm_scale=-call.sm_scale)
        self.prepare(call)(call)

    def plan(self, spec: AttentionSpec, batch: PagedBatch, num_tokens: int, form: PlanForm, plan: Tensor) -> None:
        self.prepare_plan(spec, batch, num_tokens, form, plan.numel())(batch, plan)

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
        APPEND.form(key, constants)((-(-num_tokens // APPEND_TOKENS), num_heads, 1), arguments)

    def merge(self, outs: list[Tensor], lses: list[Tensor], out: Tensor, lse: Tensor) -> None:
        num_tokens, num_heads, dim = out.shape
        num_rows = num_tokens * num_heads
        if num_rows == 0:
            return
        strides = (tuple(x.stride()[:2] for x in outs), tuple(x.stride() for x in lses), out.stride()[:2], lse.stride())
        arguments = (tuple(outs), tuple(lses), out, lse, *strides, num_rows)
        constants = merge_constants(num_heads, dim)
        key = (dim, out.dtype, strides, alignment(*outs, *lses, out, lse), out.device)
        MERGE.form(key, constants)((-(-num_rows // MERGE_ROWS), 1, 1), arguments)


def _do_nothing(call: AttentionCall) -> None:
    """There is no row to write."""


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
