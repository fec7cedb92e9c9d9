"""Tile sizes: pure functions of the problem, never of lengths on a device."""

from dataclasses import dataclass

import torch

from octavo.problem import Arch, AttentionSpec

SMALL_ROWS, MEDIUM_ROWS, LARGE_ROWS = 16, 64, 128
ASYNC_TENSOR_CORES = (90, 100, 103)  # wgmma and tcgen05


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
    if mean_rows <= SMALL_ROWS or _is_precise(spec):
        return SMALL_ROWS
    return MEDIUM_ROWS if mean_rows <= MEDIUM_ROWS or is_wide(spec) else LARGE_ROWS


def is_wide(spec: AttentionSpec) -> bool:
    """Whether accumulators of 128 rows do not fit the registers."""
    return max(spec.head_dim, spec.v_dim) > 128


def _is_precise(spec: AttentionSpec) -> bool:
    """Whether a product is three tf32 ones, whose operands take registers."""
    return spec.dtype == torch.float32


def _reads_shared(arch: Arch) -> bool:
    """Whether tensor cores take Q, K and V from shared memory rather than from registers."""
    return arch.sm in ASYNC_TENSOR_CORES


def tile_config(spec: AttentionSpec, block_m: int, arch: Arch) -> TileConfig:
    """The largest key block and deepest pipeline whose tiles fit the shared memory and registers of `arch`."""
    width = next_power_of_2(spec.head_dim) + next_power_of_2(spec.v_dim)
    q_bytes = block_m * next_power_of_2(spec.head_dim) * spec.dtype.itemsize if _reads_shared(arch) else 0
    num_warps = 8 if block_m == LARGE_ROWS or (is_wide(spec) and (block_m == MEDIUM_ROWS or _is_precise(spec))) else 4
    # Tensor cores that read shared memory find K and V of 8 bits there once more, in q's dtype.
    converted = width * spec.dtype.itemsize if spec.kv_dtype is not None and _reads_shared(arch) else 0
    for block_n, num_stages in _key_blocks(spec, block_m, arch):
        key_bytes = num_stages * width * spec.cache_dtype.itemsize + converted
        if q_bytes + block_n * key_bytes <= shared_bytes(arch):
            return TileConfig(block_m, block_n, num_warps, num_stages)
    return TileConfig(block_m, 16, num_warps, 1)


def short_tile(spec: AttentionSpec, arch: Arch) -> TileConfig:
    """Tile of SMALL_ROWS rows where no sequence has more than some hundred keys: done soonest by few warps."""
    tile = tile_config(spec, SMALL_ROWS, arch)
    if is_wide(spec) or _is_precise(spec):
        return tile
    return TileConfig(SMALL_ROWS, min(tile.block_n, 64), 2, 3 if _reads_shared(arch) else 2)


def many_tile(spec: AttentionSpec, arch: Arch) -> TileConfig:
    """Tile of SMALL_ROWS rows where there are several for every program: more, smaller programs end more evenly."""
    tile = tile_config(spec, SMALL_ROWS, arch)
    if arch.sm != 90 or is_wide(spec) or _is_precise(spec):
        return tile
    return TileConfig(SMALL_ROWS, min(tile.block_n, 64), 2, 3)


def _key_blocks(spec: AttentionSpec, block_m: int, arch: Arch) -> tuple[tuple[int, int], ...]:
    """(keys, pipeline stages) to try, best first; shorter where longer ones would spill registers."""
    if _is_precise(spec):
        return ((32, 2), (16, 2))
    if block_m == SMALL_ROWS:
        # Little arithmetic hides behind the loads: long tiles keep more of them in flight.
        long = ((128, 2),) if max(spec.head_dim, spec.v_dim) > 64 else ()
        return (*long, (64, 3 if _reads_shared(arch) else 2), (64, 2), (32, 2), (16, 2))
    if not _reads_shared(arch) and max(spec.head_dim, spec.v_dim) > 64:
        if is_wide(spec):
            return ((64, 2), (32, 2), (16, 2))
        return (((32, 3),) if block_m == LARGE_ROWS else ()) + ((32, 2), (16, 2))
    if block_m == LARGE_ROWS:
        # fp8 keys and values become q's dtype in registers, of which longer ones leave none.
        long = ((128, 3),) if spec.kv_dtype is None else ()
        return (*long, (64, 3), (64, 2), (32, 2), (16, 2))
    return ((64, 3), (64, 2), (32, 2), (16, 2))


def shared_bytes(arch: Arch) -> int:
    """Shared memory that one program may take, less what the compiler adds (CUDA programming guide, table 30)."""
    if arch.kind == "hip":
        return 60 * 1024
    return {80: 160, 87: 160, 90: 224, 100: 224, 103: 224}.get(arch.sm, 96) * 1024
