"""Tile sizes: pure functions of the problem, never of lengths on a device."""

from dataclasses import dataclass

import torch

from octavo.problem import AttentionSpec

SMALL_ROWS, MEDIUM_ROWS, LARGE_ROWS = 16, 64, 128


@dataclass(frozen=True)
class TileConfig:
    """How the portable kernel cuts and pipelines one query tile."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def rows_per_tile(spec: AttentionSpec, num_tokens: int, num_sequences: int) -> int:
    """Rows (token, head in group) per query tile, from the mean rows per sequence that the shapes imply.

    16 is the least that tensor cores take; 128 reuses K/V most. Three classes only, so that few kernels are compiled.
    """
    mean_rows = num_tokens * spec.group_size / max(num_sequences, 1)
    if mean_rows <= SMALL_ROWS:
        return SMALL_ROWS
    return MEDIUM_ROWS if mean_rows <= MEDIUM_ROWS or _is_wide(spec) else LARGE_ROWS


def _is_wide(spec: AttentionSpec) -> bool:
    """128 rows of float32 accumulators this wide, or of float32 inputs, do not fit the registers."""
    return max(spec.head_dim, spec.v_dim) > 128 or spec.dtype == torch.float32


def tile_config(spec: AttentionSpec, block_m: int, shared_bytes: int) -> TileConfig:
    """The largest key block and deepest pipeline whose K, V and Q tiles fit `shared_bytes` of shared memory."""
    width = next_power_of_2(spec.head_dim) + next_power_of_2(spec.v_dim)
    q_bytes = block_m * next_power_of_2(spec.head_dim) * spec.dtype.itemsize
    for block_n, num_stages in ((128, 3), (64, 3), (128, 2), (64, 2), (32, 3), (32, 2), (16, 2)):
        too_wide = block_n > 64 and (width > 256 or block_m < LARGE_ROWS)
        too_precise = block_n > 32 and spec.dtype == torch.float32
        if not too_wide and not too_precise and q_bytes + num_stages * block_n * width * spec.dtype.itemsize <= shared_bytes:
            return TileConfig(block_m, block_n, 8 if block_m == LARGE_ROWS else 4, num_stages)
    return TileConfig(block_m, 16, 4, 1)
