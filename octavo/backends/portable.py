"""Launching the portable attention kernels: over a list of a plan, or planning inside."""

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from octavo.backends.arch import arch_of
from octavo.backends.base import AttentionCall
from octavo.backends.constants import (
    INLINE_SEQUENCES,
    PlanConstants,
    attention_constants,
    launches_early,
    list_options,
    plan_constants,
    tile_options,
)
from octavo.backends.extras import NO_KINDS, Kinds, VariantArguments, variant_arguments
from octavo.backends.launch import Launch, Launcher, Scratch, alignment
from octavo.planning.form import PlanForm, PlanLayout, SplitChoice, layout_of, schedule_config
from octavo.planning.schedule import ScheduleConfig, max_items, max_tiles
from octavo.planning.tiles import SMALL_ROWS, TileConfig, many_tile, short_tile, tile_config
from octavo.problem import Arch, AttentionSpec, PagedBatch
from octavo.shapes import Tensor
from octavo.work_item import NUM_ITEMS, NUM_SMALL_ITEMS

ATTENTION = Launcher("octavo.kernels.attention", "attention_kernel")
INLINE = Launcher("octavo.kernels.attention", "attention_inline_kernel")
SCRATCH = Scratch()
MANY_TILES = 3  # for every program that runs at a time


@dataclass(frozen=True, eq=False)
class Tuning:
    """What an experiment may vary; the defaults are what is used. Compiled forms go by identity."""

    split: SplitChoice = field(default_factory=SplitChoice)
    small_tile: TileConfig | None = None
    """Tile of SMALL_ROWS rows; None takes the choice of planning/tiles.py."""
    small_programs: int = 2
    """Programs on an SM, by tile: SMALL_ROWS, MEDIUM_ROWS, more rows."""
    medium_programs: int = 2
    large_programs: int = 1
    inline: bool = True
    """Whether small batches are planned in the attention kernel."""

    def config(self, form: PlanForm) -> ScheduleConfig:
        return schedule_config(form, self.split)


DEFAULT_TUNING = Tuning()


class Bounds(NamedTuple):
    """What launches follow from, besides the problem: all from shapes."""

    arch: Arch
    num_tokens: int
    num_sequences: int
    dense: bool
    same_strides: bool
    kinds: Kinds = NO_KINDS


class ListLaunch(NamedTuple):
    """The attention kernel over one list of a plan, but for the tensors."""

    items: int
    scalars: tuple[int, int, int]
    """Place of the list's first item; where its partial states begin; how many there is room for."""
    key: Hashable
    constants: dict[str, Any]
    options: dict[str, int]


class InlineLaunch(NamedTuple):
    """The attention kernel that plans by itself, but for the tensors."""

    items: int
    num_states: int
    state_words: int
    key: Hashable
    constants: dict[str, Any]
    options: dict[str, int]


def table_of(batch: PagedBatch) -> tuple[Tensor, Tensor, Tensor | None, int, int]:
    """Where the lengths are: qo_indptr, kv_indptr or kv_lens, last_page_len, page table row stride and entries."""
    if batch.kv_lens is not None:
        return batch.qo_indptr, batch.kv_lens, None, batch.page_table.stride(0), batch.page_table.shape[1]
    assert batch.kv_indptr is not None
    return batch.qo_indptr, batch.kv_indptr, batch.last_page_len, 0, batch.page_table.shape[0]


def bounds_of(call: AttentionCall) -> Bounds:
    same = call.k_cache.stride()[:3] == call.v_cache.stride()[:3]
    return Bounds(arch_of(call.q.device), call.q.shape[0], call.batch.num_sequences, call.batch.is_dense, same)


@functools.lru_cache(maxsize=1024)
def planned(
    spec: AttentionSpec, form: PlanForm, tuning: Tuning, arch: Arch, dense: bool, words: int
) -> tuple[PlanConstants, ScheduleConfig, PlanLayout]:
    config = tuning.config(form)
    return plan_constants(spec, config, dense, launches_early(arch)), config, layout_of(spec, words, config)


@functools.lru_cache(maxsize=4096)
def list_launch(
    spec: AttentionSpec, form: PlanForm, tuning: Tuning, bounds: Bounds, block_m: int, words: int
) -> ListLaunch:
    _, config, layout = planned(spec, form, tuning, bounds.arch, bounds.dense, words)
    is_small = block_m == config.small_m
    # Kernels of large tiles have no form that can't combine: it would save little, and be one more to compile.
    cuts = (config.small_split if is_small else config.split).cuts or block_m > SMALL_ROWS
    override = tuning.small_tile if block_m == SMALL_ROWS else None
    if block_m == SMALL_ROWS and _are_many(spec, form, tuning, bounds):
        override = override or many_tile(spec, bounds.arch)
    tile, shared, options = attention_form(
        spec, block_m, bounds.arch, bounds.same_strides, cuts, override, bounds.kinds
    )
    states = (layout.small_states_begin, layout.small_states) if is_small else (layout.capacity, layout.states)
    items = min(max_items(spec, bounds.num_tokens, bounds.num_sequences, config), layout.capacity)
    early = launches_early(bounds.arch)
    constants = {"COUNT": NUM_SMALL_ITEMS if is_small else NUM_ITEMS, **shared, "EARLY": early}
    options = {**options, **list_options(bounds.arch)}
    first_item = layout.capacity - 1 if is_small else 0
    return ListLaunch(items, (first_item, *states), (tile, cuts, is_small), constants, options)


@functools.lru_cache(maxsize=4096)
def inline_launch(spec: AttentionSpec, form: PlanForm, tuning: Tuning, bounds: Bounds) -> InlineLaunch:
    config = tuning.config(form)
    cuts = config.split.cuts
    override = tuning.small_tile
    same, kinds = bounds.same_strides, bounds.kinds
    tile, shared, options = attention_form(spec, SMALL_ROWS, bounds.arch, same, cuts, override, kinds)
    tiles = max_tiles(spec, bounds.num_tokens, bounds.num_sequences, SMALL_ROWS)
    room = config.split.states(tiles) if cuts else 0
    constants = {"C": inline_constants(spec, config, bounds.dense), **shared}
    items = max_items(spec, bounds.num_tokens, bounds.num_sequences, config)
    words = room * SMALL_ROWS * (spec.v_dim + 1)
    return InlineLaunch(items, room, words, (tile, form, tuning, bounds.dense), constants, options)


class _Forms:
    """A kernel's forms for calls that look alike: one, or one for each kind of values that their variants bring."""

    def __init__(self, launcher: Launcher, key: Hashable, find: Callable[[Kinds], ListLaunch | InlineLaunch]) -> None:
        self._launcher, self._key, self._find = launcher, key, find
        self._known: dict[Hashable, Launch] = {}

    def of(self, given: VariantArguments | None) -> Launch:
        """given: None for a plain call."""
        key = given and given.key
        launch = self._known.get(key)
        if launch is None:
            found = self._find(given.kinds if given else NO_KINDS)
            form = (self._key, found.key, key)
            launch = self._known[key] = self._launcher.form(form, found.constants, found.options)
        return launch


class ListRun:
    """The attention kernel over one list of a plan, for calls that look like `call`, and plans of so many words."""

    def __init__(self, call: AttentionCall, form: PlanForm, words: int, block_m: int, tuning: Tuning) -> None:
        spec, bounds = call.spec, bounds_of(call)

        def find(kinds: Kinds) -> ListLaunch:
            return list_launch(spec, form, tuning, bounds._replace(kinds=kinds), block_m, words)

        key, strides = _look(call)
        self._forms = _Forms(ATTENTION, (key, 0 if call.plan is None else alignment(call.plan)), find)
        self._plain = self._forms.of(None) if spec.is_plain else None
        launch = find(NO_KINDS)
        self._grid = (launch.items, 1, 1)
        self._counts, self._strides = (call.q.shape[0], call.k_cache.shape[0], *launch.scalars), strides
        self._rest = (*self._counts, None, None, *strides)

    def __call__(self, call: AttentionCall, plan: Tensor) -> None:
        if self._plain is None:
            self._vary(call, plan)
            return
        tensors = (call.q, call.k_cache, call.v_cache, call.out, call.lse, plan, call.batch.page_table)
        self._plain(self._grid, (*tensors, call.scale_tensor, call.sm_scale, *self._rest))

    def _vary(self, call: AttentionCall, plan: Tensor) -> None:
        given = variant_arguments(call)
        tensors = (given.q, call.k_cache, call.v_cache, call.out, call.lse, plan, call.batch.page_table)
        more = (*self._counts, given.extras, given.mask_length, *self._strides)
        self._forms.of(given)(self._grid, (*tensors, call.scale_tensor, given.sm_scale, *more))


class InlineRun:
    """Attention of a batch of fewer than INLINE_SEQUENCES sequences, planned inside the kernel."""

    def __init__(self, call: AttentionCall, form: PlanForm, tuning: Tuning) -> None:
        spec, bounds = call.spec, bounds_of(call)

        def find(kinds: Kinds) -> InlineLaunch:
            return inline_launch(spec, form, tuning, bounds._replace(kinds=kinds))

        key, strides = _look(call)
        self._forms = _Forms(INLINE, (key, table_dtypes(call.batch), alignment(call.lse)), find)
        self._plain = self._forms.of(None) if spec.is_plain else None
        launch = find(NO_KINDS)
        self._grid = (launch.items, 1, 1)
        self._states, self._words = launch.num_states, launch.state_words
        self._counts = (call.q.shape[0], call.k_cache.shape[0])
        self._rest = (call.batch.num_sequences, *strides)

    def __call__(self, call: AttentionCall) -> None:
        states = counters = call.lse
        if self._states:
            states, counters = SCRATCH.take(self._words, self._states, call.q.device)
        room = (states, counters, self._states)
        if self._plain is None:
            self._vary(call, room)
            return
        tensors = (call.q, call.k_cache, call.v_cache, call.out, call.lse, call.batch.page_table, call.scale_tensor)
        arguments = (*tensors, call.sm_scale, *self._counts, *room, None, None, *table_of(call.batch), *self._rest)
        self._plain(self._grid, arguments)

    def _vary(self, call: AttentionCall, room: tuple[Tensor, Tensor, int]) -> None:
        given = variant_arguments(call)
        tensors = (given.q, call.k_cache, call.v_cache, call.out, call.lse, call.batch.page_table, call.scale_tensor)
        more = (*room, given.extras, given.mask_length, *table_of(call.batch), *self._rest)
        self._forms.of(given)(self._grid, (*tensors, given.sm_scale, *self._counts, *more))


def table_dtypes(batch: PagedBatch) -> tuple[torch.dtype | None, ...]:
    return tuple(None if x is None else x.dtype for x in table_of(batch)[:3])


def _look(call: AttentionCall) -> tuple[Hashable, tuple[Any, ...]]:
    """(key part, strides) of the arguments that the kernels share."""
    q, k_cache, v_cache, out, lse, table = call.q, call.k_cache, call.v_cache, call.out, call.lse, call.batch.page_table
    strides = (q.stride()[:2], k_cache.stride()[:3], v_cache.stride()[:3], out.stride()[:2], lse.stride())
    scaled = call.scale_tensor is not None
    return (call.spec, strides, table.dtype, scaled, alignment(q, k_cache, v_cache, out), q.device), strides


def _are_many(spec: AttentionSpec, form: PlanForm, tuning: Tuning, bounds: Bounds) -> bool:
    """Whether there are several tiles of SMALL_ROWS for every program. What must not depend on the batch never asks."""
    tiles = max_tiles(spec, bounds.num_tokens, bounds.num_sequences, SMALL_ROWS)
    return not form.batch_invariant and tiles >= MANY_TILES * tuning.small_programs * bounds.arch.num_sms


def attention_form(
    spec: AttentionSpec,
    block_m: int,
    arch: Arch,
    same_strides: bool,
    cuts: bool,
    override: TileConfig | None = None,
    kinds: Kinds = NO_KINDS,
) -> tuple[TileConfig, dict[str, Any], dict[str, int]]:
    """(tile, constexprs that the attention kernels share, compiler options)."""
    # Only few keys are never cut.
    tile = override or (tile_config(spec, block_m, arch) if cuts else short_tile(spec, arch))
    return tile, attention_constants(spec, tile, same_strides, cuts, kinds), tile_options(tile, arch)


def inline_constants(spec: AttentionSpec, config: ScheduleConfig, dense: bool) -> PlanConstants:
    return plan_constants(spec, config, dense)._replace(OTHERS=INLINE_SEQUENCES)
