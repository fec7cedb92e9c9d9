"""Launching the portable attention kernels: over a list of a plan, or planning inside."""

import functools
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from octavo.backends.arch import arch_of
from octavo.backends.base import AttentionCall
from octavo.backends.constants import INLINE_SEQUENCES, PlanConstants, attention_constants, plan_constants
from octavo.backends.launch import Launcher, Zeros, alignment, on_device_of
from octavo.planning.form import PlanForm, PlanLayout, SplitChoice, layout_of, schedule_config
from octavo.planning.schedule import ScheduleConfig, max_items, max_tiles
from octavo.planning.tiles import SMALL_ROWS, TileConfig, tile_config
from octavo.problem import Arch, AttentionSpec, PagedBatch
from octavo.shapes import Tensor
from octavo.work_item import NUM_ITEMS, NUM_SMALL_ITEMS

ATTENTION = Launcher("octavo.kernels.attention", "attention_kernel")
INLINE = Launcher("octavo.kernels.attention", "attention_inline_kernel")
COUNTERS = Zeros()


@dataclass(frozen=True)
class Tuning:
    """What an experiment may vary; the defaults are what is used."""

    split: SplitChoice = field(default_factory=SplitChoice)
    small_tile: TileConfig | None = None
    """Tile of SMALL_ROWS rows; None takes the choice of planning/tiles.py."""
    small_programs: int = 2
    """Programs on an SM, by tile: SMALL_ROWS, MEDIUM_ROWS, more rows."""
    medium_programs: int = 2
    large_programs: int = 1
    inline: bool = True
    """Whether small batches are planned in the attention kernel."""

    @property
    def tag(self) -> Hashable:
        """Key part for compiled forms."""
        return None if self is DEFAULT_TUNING else self


DEFAULT_TUNING = Tuning()


def table_of(batch: PagedBatch) -> tuple[Tensor, Tensor, Tensor | None, int, int]:
    """Where the lengths are: qo_indptr, kv_indptr or kv_lens, last_page_len, page table row stride and entries."""
    if batch.kv_lens is not None:
        return batch.qo_indptr, batch.kv_lens, None, batch.page_table.stride(0), batch.page_table.shape[1]
    assert batch.kv_indptr is not None
    return batch.qo_indptr, batch.kv_indptr, batch.last_page_len, 0, batch.page_table.shape[0]


@functools.lru_cache(maxsize=1024)
def planned(
    spec: AttentionSpec, form: PlanForm, choice: SplitChoice, dense: bool, words: int
) -> tuple[PlanConstants, ScheduleConfig, PlanLayout]:
    config = schedule_config(form, choice)
    return plan_constants(spec, config, dense), config, layout_of(spec, words, config)


def launch_list(
    call: AttentionCall, plan: Tensor, block_m: int, where: tuple[ScheduleConfig, PlanLayout], tuning: Tuning
) -> None:
    """Attention over the list of a plan whose tiles have block_m rows."""
    config, layout = where
    is_small = block_m == config.small_m
    cuts = (config.small_split if is_small else config.split).cuts
    states = (layout.small_states_begin, layout.small_states) if is_small else (layout.capacity, layout.states)
    inputs, strides, key = _inputs(call)
    tile, shared, options = _form(call, block_m, cuts, tuning)
    constants = {"COUNT": NUM_SMALL_ITEMS if is_small else NUM_ITEMS, **shared}
    last_item = layout.capacity - 1 if is_small else -1
    arguments = (*inputs[:5], plan, *inputs[5:], last_item, *states, *strides)
    items = min(max_items(call.spec, call.q.shape[0], call.batch.num_sequences, config), layout.capacity)
    with on_device_of(call.q):
        key = (*key, tile, cuts, is_small, plan.data_ptr() & 15)
        ATTENTION((items, 1, 1), key, arguments, constants, options)


def launch_inline(call: AttentionCall, config: ScheduleConfig, tuning: Tuning) -> None:
    """Attention of a batch of fewer than INLINE_SEQUENCES sequences, planning inside the kernel."""
    spec, batch, q = call.spec, call.batch, call.q
    cuts = config.split.cuts
    room = config.split.states(max_tiles(spec, q.shape[0], batch.num_sequences, SMALL_ROWS))
    states = counters = call.lse
    if cuts:
        states = torch.empty(room * SMALL_ROWS * (spec.v_dim + 1), dtype=torch.float32, device=q.device)
        counters = COUNTERS.take(room, q.device)
    table = table_of(batch)
    inputs, strides, key = _inputs(call)
    tile, shared, options = _form(call, SMALL_ROWS, cuts, tuning)
    constants = {"C": inline_constants(spec, config, batch.is_dense), **shared}
    arguments = (*inputs, states, counters, room, *table, batch.num_sequences, *strides)
    dtypes = tuple(None if x is None else x.dtype for x in table[:3])
    items = max_items(spec, q.shape[0], batch.num_sequences, config)
    with on_device_of(q):
        key = (*key, tile, config, dtypes, batch.is_dense, alignment(call.lse))
        INLINE((items, 1, 1), key, arguments, constants, options)


def _inputs(call: AttentionCall) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Hashable, ...]]:
    """(arguments that the kernels share, strides, key part)."""
    q, k_cache, v_cache, out, lse, table = call.q, call.k_cache, call.v_cache, call.out, call.lse, call.batch.page_table
    inputs = (q, k_cache, v_cache, out, lse, table, call.scale_tensor, call.sm_scale, q.shape[0], k_cache.shape[0])
    strides = (q.stride()[:2], k_cache.stride()[:3], v_cache.stride()[:3], out.stride()[:2], lse.stride())
    scaled = call.scale_tensor is not None
    key = (call.spec, strides, table.dtype, scaled, alignment(q, k_cache, v_cache, out), q.device)
    return inputs, strides, key


def _form(
    call: AttentionCall, block_m: int, cuts: bool, tuning: Tuning
) -> tuple[TileConfig, dict[str, int | str], dict[str, int]]:
    same = call.k_cache.stride()[:3] == call.v_cache.stride()[:3]
    override = tuning.small_tile if block_m == SMALL_ROWS else None
    return attention_form(call.spec, block_m, arch_of(call.q.device), same, cuts, override)


@functools.lru_cache(maxsize=256)
def attention_form(
    spec: AttentionSpec, block_m: int, arch: Arch, same_strides: bool, cuts: bool, override: TileConfig | None = None
) -> tuple[TileConfig, dict[str, int | str], dict[str, int]]:
    """(tile, constexprs that the attention kernels share, compiler options)."""
    tile = override or tile_config(spec, block_m, arch)
    return (tile, *attention_constants(spec, tile, same_strides, cuts))


@functools.lru_cache(maxsize=256)
def inline_constants(spec: AttentionSpec, config: ScheduleConfig, dense: bool) -> PlanConstants:
    return plan_constants(spec, config, dense)._replace(OTHERS=INLINE_SEQUENCES)
