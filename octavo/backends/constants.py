"""Compile-time constants of the Triton kernels, from the decisions in planning/."""

import functools
from typing import Any, NamedTuple

import torch

from octavo.backends.extras import Kinds
from octavo.planning.schedule import ScheduleConfig, right_of
from octavo.planning.split import SplitConfig
from octavo.planning.tiles import SMALL_ROWS, TileConfig, next_power_of_2
from octavo.problem import Arch, AttentionSpec

OWN_SEQUENCES, OTHER_SEQUENCES, ITEMS_AT_ONCE = 16, 256, 64
INLINE_SEQUENCES = 128
"""Sequences, with the padding, that a program of the attention kernel can plan for by itself."""
APPEND_TOKENS, MERGE_ROWS = 16, 16
COMBINED_REGISTERS, FEWER_COMBINED_REGISTERS = 64, 32
"""Registers of a thread for partial states that are combined; fewer where tiles are large, which have few parts."""


class ListConstants(NamedTuple):
    """How one list of a plan is cut (planning/split.py)."""

    WORKERS: int
    KEY_BLOCK: int
    MIN_BLOCKS: int
    BY_AREA: bool
    FIXED_BLOCKS: int
    FIXED_PARTS: int


class PlanConstants(NamedTuple):
    """The planner's constants: `C` in kernels/plan.py."""

    GROUP: int
    HKV: int
    LEFT: int
    """Keys before and after its own that a row sees; -1: all."""
    RIGHT: int
    PAGE_SIZE: int
    DENSE: bool
    BLOCK_M: int
    SMALL_M: int
    MAIN: ListConstants
    SMALL: ListConstants
    DEAD_TILES: int
    L2_KEYS: int
    OWN: int = OWN_SEQUENCES
    OTHERS: int = OTHER_SEQUENCES
    ITEMS: int = ITEMS_AT_ONCE
    EARLY: bool = False
    """Whether the next kernel may be launched before this one has ended."""


class VariantConstants(NamedTuple):
    """Variants that a kernel is compiled for: `V` in kernels/variants.py."""

    LEFT: int
    RIGHT: int
    SOFT_CAP: float
    SINKS: bool
    ALIBI: bool
    MASK: int
    K_SCALE: int
    V_SCALE: int


def launches_early(arch: Arch) -> bool:
    """Whether a kernel can be launched before the one before it has ended (programmatic dependent launch)."""
    return arch.kind == "cuda" and arch.sm >= 90


@functools.lru_cache(maxsize=256)
def plan_constants(spec: AttentionSpec, config: ScheduleConfig, dense: bool, early: bool = False) -> PlanConstants:
    return PlanConstants(
        spec.group_size,
        spec.num_kv_heads,
        spec.window_left,
        right_of(spec),
        spec.page_size,
        dense,
        config.block_m,
        config.small_m,
        _list_constants(config.split),
        _list_constants(config.small_split),
        config.dead_tiles,
        config.l2_bytes // ((spec.head_dim + spec.v_dim) * spec.cache_dtype.itemsize),
        EARLY=early,
    )


def list_options(arch: Arch) -> dict[str, int]:
    """Compiler options, beside the tile's, of the kernel that takes planned items."""
    return {"launch_pdl": True} if launches_early(arch) else {}


def tile_options(tile: TileConfig, arch: Arch) -> dict[str, int]:
    """Compiler options of a tile."""
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    if arch.kind == "cuda" and tile.block_m == SMALL_ROWS:
        # Without a bound of its own ptxas may take 128 here, and spills.
        options["maxnreg"] = 255
    return options


def plan_options(arch: Arch) -> dict[str, int]:
    """Compiler options of the planner. Without a bound of its own, ptxas takes a lower one, and spills."""
    return {"num_warps": 8, "maxnreg": 128} if arch.kind == "cuda" else {"num_warps": 8}


def _list_constants(split: SplitConfig) -> ListConstants:
    return ListConstants(
        split.workers, split.key_block, split.min_blocks, split.by_area, split.fixed_blocks, split.fixed_parts
    )


def variant_constants(spec: AttentionSpec, kinds: Kinds) -> VariantConstants:
    return VariantConstants(
        spec.window_left,
        right_of(spec),
        float(spec.logits_soft_cap),
        spec.sinks,
        spec.alibi,
        kinds.mask,
        kinds.k_scale,
        kinds.v_scale,
    )


def attention_constants(
    spec: AttentionSpec, tile: TileConfig, same_strides: bool, cuts: bool, kinds: Kinds
) -> dict[str, Any]:
    """Constexprs that the attention kernels share."""
    constants: dict[str, Any] = {
        "GROUP": spec.group_size,
        "SAME_STRIDES": same_strides,
        "D": spec.head_dim,
        "DV": spec.v_dim,
        "D_PADDED": next_power_of_2(spec.head_dim),
        "DV_PADDED": next_power_of_2(spec.v_dim),
        "PAGE_SIZE": spec.page_size,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "NUM_STAGES": tile.num_stages,
        "PRECISION": "tf32x3" if spec.dtype == torch.float32 else "tf32",
        "COMBINED": combined_at_a_time(tile, next_power_of_2(spec.v_dim)) if cuts else None,
        "V": variant_constants(spec, kinds),
    }
    return constants


def combined_at_a_time(tile: TileConfig, width: int) -> tuple[int, int]:
    """(rows, parts) whose partial states, `width` values each, fit the registers of the tile's warps."""
    small = tile.block_m == SMALL_ROWS
    registers = COMBINED_REGISTERS if small else FEWER_COMBINED_REGISTERS
    states = 32 * tile.num_warps * registers // width
    parts = max(states // 8, 1) if small else 4
    return min(max(states // parts, 1), tile.block_m), min(parts, 32)


def append_constants(page_size: int, head_dim: int, value_dim: int, dense: bool) -> dict[str, int]:
    return {
        "PAGE_SIZE": page_size,
        "DENSE": dense,
        "D": head_dim,
        "DV": value_dim,
        "D_PADDED": next_power_of_2(head_dim),
        "DV_PADDED": next_power_of_2(value_dim),
        "BLOCK_T": APPEND_TOKENS,
    }


def merge_constants(num_heads: int, dim: int) -> dict[str, int]:
    return {"HEADS": num_heads, "DIM": dim, "PADDED": next_power_of_2(dim), "BLOCK_R": MERGE_ROWS}
