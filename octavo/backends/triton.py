"""Portable Triton backend: launchers for every GPU that Triton serves, and for its interpreter."""

import functools
import importlib.util

import torch

from octavo import work_item
from octavo.backends.arch import arch_of
from octavo.backends.base import AttentionCall
from octavo.backends.launch import Launcher, alignment, on_device_of
from octavo.planning.schedule import ScheduleConfig, max_items
from octavo.planning.tiles import next_power_of_2, rows_per_tile, tile_config
from octavo.problem import Arch, AttentionSpec, PagedBatch
from octavo.shapes import Tensor

OWN_SEQUENCES, OTHER_SEQUENCES, ITEMS_AT_ONCE = 16, 256, 64
MAX_WRITERS = 256
APPEND_TOKENS, MERGE_ROWS = 16, 16
MIN_CAPABILITY = 80

ATTENTION = Launcher("octavo.kernels.attention", "attention_kernel")
PLAN = Launcher("octavo.kernels.plan", "plan_kernel")
APPEND = Launcher("octavo.kernels.append", "append_kernel")
MERGE = Launcher("octavo.kernels.merge", "merge_kernel")


class TritonBackend:
    name = "triton"

    def reject(self, spec: AttentionSpec | None, arch: Arch) -> str | None:
        if arch.kind == "cpu":
            return "tensors are on the CPU (Triton's interpreter runs there with TRITON_INTERPRET=1)"
        if importlib.util.find_spec("triton") is None:
            return "Triton is not installed"
        if arch.kind == "cuda" and arch.sm < MIN_CAPABILITY:
            return f"needs compute capability 8.0, {arch.name} has {arch.capability[0]}.{arch.capability[1]}"
        return None

    def block_m(self, spec: AttentionSpec, num_tokens: int, num_sequences: int) -> int:
        return rows_per_tile(spec, num_tokens, num_sequences)

    def plan_words(self, spec: AttentionSpec, num_tokens: int, num_sequences: int, block_m: int) -> int:
        items = max_items(spec, num_tokens, num_sequences, block_m)
        return work_item.HEADER_WORDS + items * work_item.ITEM_WORDS

    def plan(self, spec: AttentionSpec, batch: PagedBatch, num_tokens: int, block_m: int, plan: Tensor) -> None:
        programs = -(-(batch.num_sequences + 1) // OWN_SEQUENCES)
        items = max_items(spec, num_tokens, batch.num_sequences, block_m)
        writers = max(1, min(-(-items // (programs * ITEMS_AT_ONCE)), MAX_WRITERS))
        table = _table(batch)
        key = (spec, block_m, plan.device, *(None if x is None else x.dtype for x in table[:3]), batch.is_dense)
        arguments = (plan, *table, num_tokens, batch.num_sequences, items)
        with on_device_of(plan):
            PLAN((programs, writers, 1), key, arguments, plan_constants(spec, block_m, batch.is_dense))

    def attend(self, call: AttentionCall) -> None:
        num_tokens = call.q.shape[0]
        if num_tokens == 0:
            return
        plan, block_m = call.plan, call.block_m
        if plan is None:
            block_m = self.block_m(call.spec, num_tokens, call.batch.num_sequences)
            words = self.plan_words(call.spec, num_tokens, call.batch.num_sequences, block_m)
            plan = torch.empty(words, dtype=torch.int32, device=call.q.device)
            self.plan(call.spec, call.batch, num_tokens, block_m, plan)
        if call.scale_tensor is None and call.sm_scale < 0:
            # The kernel takes a scale that it need not look at; -q is exact.
            call = call._replace(q=-call.q, sm_scale=-call.sm_scale)
        self.attend_tiles(call, plan, block_m)

    def attend_tiles(self, call: AttentionCall, plan: Tensor, block_m: int) -> None:
        """Attention over the work items of a plan whose tiles have block_m rows."""
        _launch_attention(call, plan, block_m)

    def append(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch) -> None:
        num_tokens, num_heads, head_dim = k.shape
        if num_tokens == 0 or num_heads == 0:
            return
        table = _table(batch)
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


def _table(batch: PagedBatch) -> tuple[Tensor, Tensor, Tensor | None, int, int]:
    """Where the lengths are: qo_indptr, kv_indptr or kv_lens, last_page_len, page table row stride and entries."""
    if batch.kv_lens is not None:
        return batch.qo_indptr, batch.kv_lens, None, batch.page_table.stride(0), batch.page_table.shape[1]
    assert batch.kv_indptr is not None
    return batch.qo_indptr, batch.kv_indptr, batch.last_page_len, 0, batch.page_table.shape[0]


@functools.lru_cache(maxsize=256)
def plan_constants(spec: AttentionSpec, block_m: int, dense: bool) -> dict[str, int]:
    schedule = ScheduleConfig(block_m)
    return {
        "GROUP": spec.group_size,
        "HKV": spec.num_kv_heads,
        "PAGE_SIZE": spec.page_size,
        "BLOCK_M": block_m,
        "CAUSAL": spec.causal,
        "DENSE": dense,
        "DEAD_TILES": schedule.dead_tiles,
        "L2_KEYS": schedule.l2_bytes // ((spec.head_dim + spec.v_dim) * spec.dtype.itemsize),
        "OWN": OWN_SEQUENCES,
        "OTHERS": OTHER_SEQUENCES,
        "ITEMS": ITEMS_AT_ONCE,
    }


@functools.lru_cache(maxsize=256)
def attention_constants(
    spec: AttentionSpec, block_m: int, arch: Arch, same_strides: bool
) -> tuple[dict[str, int | str], dict[str, int]]:
    """(constexprs, compiler options) of the attention kernel."""
    tile = tile_config(spec, block_m, arch)
    constants: dict[str, int | str] = {
        "GROUP": spec.group_size,
        "CAUSAL": spec.causal,
        "SAME_STRIDES": same_strides,
        "D": spec.head_dim,
        "DV": spec.v_dim,
        "D_PADDED": next_power_of_2(spec.head_dim),
        "DV_PADDED": next_power_of_2(spec.v_dim),
        "PAGE_SIZE": spec.page_size,
        "BLOCK_M": block_m,
        "BLOCK_N": tile.block_n,
        "NUM_STAGES": tile.num_stages,
        "PRECISION": "tf32x3" if spec.dtype == torch.float32 else "tf32",
    }
    return constants, {"num_warps": tile.num_warps, "num_stages": tile.num_stages}


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


def _launch_attention(call: AttentionCall, plan: Tensor, block_m: int) -> None:
    q, k_cache, v_cache, out, table = call.q, call.k_cache, call.v_cache, call.out, call.batch.page_table
    k_strides, v_strides = k_cache.stride()[:3], v_cache.stride()[:3]
    strides = (q.stride()[:2], k_strides, v_strides, out.stride()[:2], call.lse.stride())
    scale = (call.scale_tensor, call.sm_scale)
    arguments = (q, k_cache, v_cache, out, call.lse, plan, table, *scale, q.shape[0], k_cache.shape[0], *strides)
    constants, options = attention_constants(call.spec, block_m, arch_of(q.device), k_strides == v_strides)
    scaled = call.scale_tensor is not None
    key = (call.spec, block_m, strides, table.dtype, scaled, alignment(q, k_cache, v_cache, out), q.device)
    items = (plan.numel() - work_item.HEADER_WORDS) // work_item.ITEM_WORDS
    with on_device_of(q):
        ATTENTION((items, 1, 1), key, arguments, constants, options)
