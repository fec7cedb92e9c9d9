"""flashinfer.attention: BatchAttention, with lengths of sequences in place of last pages. LSE in base 2."""

from typing import Any

import torch

from octavo.compat.arguments import place, refuse
from octavo.compat.flashinfer.paged import BatchPrefillWithPagedKVCacheWrapper
from octavo.compat.flashinfer.tables import PagedCache, paged_kv
from octavo.compat.flashinfer.wrapper import Dtypes, Wrapper
from octavo.problem import PagedBatch
from octavo.shapes import Indptr, LogSumExp, Output, PageIds, PerSequence, Queries, Tensor


class BatchAttention(Wrapper):
    """Any mix of prefill and decode over a paged cache."""

    def __init__(self, kv_layout: str = "NHD", device: str = "cuda") -> None:
        super().__init__(torch.empty(0, device=device), kv_layout, False)

    def plan(
        self,
        qo_indptr: Indptr,
        kv_indptr: Indptr,
        kv_indices: PageIds,
        kv_len_arr: PerSequence,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        page_size: int,
        causal: bool = False,
        sm_scale: float | None = None,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.bfloat16,
        kv_data_type: torch.dtype = torch.bfloat16,
        use_profiler: bool = False,
    ) -> None:
        """One step's tables and static options. Tables may be on the host or the device; nothing waits for either."""
        refuse(use_profiler=use_profiler)
        spec = self._choose(
            (num_qo_heads, num_kv_heads),
            (head_dim_qk, head_dim_vo),
            page_size,
            causal,
            Dtypes.of(q_data_type, kv_data_type),
            pos_encoding_mode="NONE",
            window_left=-1,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
        )
        rows = int(qo_indptr[-1]) if qo_indptr.device.type == "cpu" else None
        tables = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        qo_indptr, kv_indptr, kv_indices, lengths = (place(x, None, self.device) for x in tables)
        last = lengths - (kv_indptr[1:] - kv_indptr[:-1] - 1).clamp(min=0) * page_size
        self._attention.set(PagedBatch.csr(qo_indptr, kv_indptr, kv_indices, last), spec, rows)

    def run(
        self,
        q: Queries,
        kv_cache: PagedCache,
        out: Output | None = None,
        lse: LogSumExp | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        logits_soft_cap: float = 0.0,
        profiler_buffer: Tensor | None = None,
        kv_cache_sf: PagedCache | None = None,
    ) -> tuple[Output, LogSumExp]:
        """(out [tokens, qo_heads, value_dim], lse [tokens, qo_heads] float32).

        logits_soft_cap is plan()'s; another one here is refused.
        """
        refuse(profiler_buffer=profiler_buffer, kv_cache_sf=kv_cache_sf)
        if logits_soft_cap > 0 and logits_soft_cap != self._logits_soft_cap:
            planned = f"{self._logits_soft_cap} as planned"
            raise ValueError(f"logits_soft_cap: expected {planned}, got {logits_soft_cap}; fix: give it to plan()")
        kv = paged_kv(kv_cache, self._kv_layout)
        result = self._run(q, kv, out=out, lse=lse, return_lse=True, k_scale=k_scale, v_scale=v_scale)
        return result[0], result[1]


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """A prefill wrapper whose `run` takes sinks [qo_heads] float32 and the scale: run(q, cache, sinks, sm_scale)."""

    def __init__(
        self,
        float_workspace_buffer: Tensor | None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        q_data_type: torch.dtype = torch.bfloat16,
        kv_data_type: torch.dtype = torch.bfloat16,
        head_dim_qk: int = 128,
        head_dim_vo: int = 128,
        window_left: int = -1,
    ) -> None:
        buffers = (qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, *buffers, backend=backend)

    def run(self, q: Queries, paged_kv_cache: PagedCache, *args: Any, **options: Any) -> Any:
        """As BatchPrefillWithPagedKVCacheWrapper.run, with (sinks, sm_scale) after the cache."""
        sinks, sm_scale = (*args, None, None)[:2]
        if sm_scale is not None:
            self._sm_scale = float(sm_scale)
        return super().run(q, paged_kv_cache, **({"sinks": sinks} | options))


__all__ = ["BatchAttention", "BatchAttentionWithAttentionSinkWrapper"]
