"""Portable Triton backend: launchers for every GPU that Triton serves, and for its interpreter."""

import importlib.util

import torch

from octavo import work_item
from octavo.backends.arch import arch_of
from octavo.backends.base import AttentionCall
from octavo.planning.schedule import max_items
from octavo.planning.tiles import next_power_of_2, rows_per_tile, tile_config
from octavo.problem import Arch, AttentionSpec, PagedBatch
from octavo.shapes import Tensor

OWN_SEQUENCES, OTHER_SEQUENCES, ITEMS_AT_ONCE = 16, 256, 256
APPEND_TOKENS, MERGE_ROWS = 16, 16
MIN_CAPABILITY = 80


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
        from octavo.kernels.plan import plan_kernel

        programs = -(-(batch.num_sequences + 1) // OWN_SEQUENCES)
        items = max_items(spec, num_tokens, batch.num_sequences, block_m)
        writers = max(1, min(-(-items // (programs * ITEMS_AT_ONCE)), 64))
        plan_kernel[(programs, writers)](
            plan,
            *_table(batch),
            num_tokens,
            batch.num_sequences,
            **plan_constants(spec, block_m, batch.is_dense),
        )

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
        _launch_attention(call, plan, block_m)

    def append(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch) -> None:
        from octavo.kernels.append import append_kernel

        num_tokens, num_heads, head_dim = k.shape
        if num_tokens == 0 or num_heads == 0:
            return
        qo_indptr, kv_ptr, last_page_len, table_stride, entries = _table(batch)
        append_kernel[(-(-num_tokens // APPEND_TOKENS), num_heads)](
            k,
            v,
            k_cache,
            v_cache,
            qo_indptr,
            kv_ptr,
            last_page_len,
            batch.page_table,
            table_stride,
            entries,
            num_tokens,
            batch.num_sequences,
            k_cache.shape[0],
            batch.num_sequences.bit_length() + 1,
            k.stride()[:2],
            v.stride()[:2],
            k_cache.stride()[:3],
            v_cache.stride()[:3],
            **append_constants(k_cache.shape[1], head_dim, v.shape[2], batch.is_dense),
        )

    def merge(self, outs: list[Tensor], lses: list[Tensor], out: Tensor, lse: Tensor) -> None:
        from octavo.kernels.merge import merge_kernel

        num_tokens, num_heads, dim = out.shape
        num_rows = num_tokens * num_heads
        if num_rows == 0:
            return
        merge_kernel[(-(-num_rows // MERGE_ROWS),)](
            tuple(outs),
            tuple(lses),
            out,
            lse,
            tuple(x.stride()[:2] for x in outs),
            tuple(x.stride() for x in lses),
            out.stride()[:2],
            lse.stride(),
            num_rows,
            **merge_constants(num_heads, dim),
        )


def _table(batch: PagedBatch) -> tuple[Tensor, Tensor, Tensor | None, int, int]:
    """Where the lengths are: qo_indptr, kv_indptr or kv_lens, last_page_len, page table row stride and entries."""
    if batch.kv_lens is not None:
        return batch.qo_indptr, batch.kv_lens, None, batch.page_table.stride(0), batch.page_table.shape[1]
    assert batch.kv_indptr is not None
    return batch.qo_indptr, batch.kv_indptr, batch.last_page_len, 0, batch.page_table.shape[0]


def plan_constants(spec: AttentionSpec, block_m: int, dense: bool) -> dict[str, int]:
    return {
        "GROUP": spec.group_size,
        "HKV": spec.num_kv_heads,
        "PAGE_SIZE": spec.page_size,
        "BLOCK_M": block_m,
        "CAUSAL": spec.causal,
        "DENSE": dense,
        "OWN": OWN_SEQUENCES,
        "OTHERS": OTHER_SEQUENCES,
        "ITEMS": ITEMS_AT_ONCE,
    }


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
    from octavo.kernels.attention import attention_kernel

    spec = call.spec
    same_strides = call.k_cache.stride() == call.v_cache.stride()
    constants, options = attention_constants(spec, block_m, arch_of(call.q.device), same_strides)
    items = (plan.numel() - work_item.HEADER_WORDS) // work_item.ITEM_WORDS
    attention_kernel[(items,)](
        call.q,
        call.k_cache,
        call.v_cache,
        call.out,
        call.lse,
        plan,
        call.batch.page_table,
        call.scale_tensor,
        call.sm_scale,
        call.q.shape[0],
        call.k_cache.shape[0],
        call.q.stride()[:2],
        call.k_cache.stride()[:3],
        call.v_cache.stride()[:3],
        call.out.stride()[:2],
        call.lse.stride(),
        **constants,
        **options,
    )
