"""flashinfer.cascade: states of attention over disjoint keys, and cascades of them. LSE in base 2."""

from typing import Any

import torch

from octavo.compat.arguments import not_carried
from octavo.compat.flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
from octavo.compat.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from octavo.compat.flashinfer.single import single_prefill_with_kv_cache
from octavo.compat.flashinfer.states import merge_state, merge_state_in_place, merge_states
from octavo.compat.flashinfer.tables import PagedCache
from octavo.merge import merge
from octavo.shapes import Tensor


class MultiLevelCascadeAttentionWrapper:
    """Several levels of one paged cache, the most widely shared first; `run` returns out alone."""

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: Tensor | None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: list[Tensor] | None = None,
        paged_kv_indptr_buf_arr: list[Tensor] | None = None,
        paged_kv_indices_buf_arr: list[Tensor] | None = None,
        paged_kv_last_page_len_buf_arr: list[Tensor] | None = None,
    ) -> None:
        buffers: dict[str, Any] = {
            "qo_indptr_buf": qo_indptr_buf_arr,
            "paged_kv_indptr_buf": paged_kv_indptr_buf_arr,
            "paged_kv_indices_buf": paged_kv_indices_buf_arr,
            "paged_kv_last_page_len_buf": paged_kv_last_page_len_buf_arr,
        }
        if use_cuda_graph and any(b is None or len(b) != num_levels for b in buffers.values()):
            raise ValueError("buffers: expected one of each kind per level with use_cuda_graph; fix: pass four lists")
        self._use_cuda_graph = use_cuda_graph
        self._levels = [
            BatchPrefillWithPagedKVCacheWrapper(
                float_workspace_buffer,
                kv_layout,
                use_cuda_graph,
                **{name: b[i] for name, b in buffers.items() if b is not None and use_cuda_graph},
            )
            for i in range(num_levels)
        ]

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._use_cuda_graph

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffers: list[Tensor]) -> None:
        """Nothing to do: plans live in memory of their own."""

    def plan(
        self,
        qo_indptr_arr: list[Tensor],
        paged_kv_indptr_arr: list[Tensor],
        paged_kv_indices_arr: list[Tensor],
        paged_kv_last_page_len: list[Tensor],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
    ) -> None:
        """Plan every level; only the last one's keys are under the causal mask."""
        if window_left >= 0:
            not_carried("window_left of a cascade", "a level does not know where its keys are in the whole sequence")
        if pos_encoding_mode == "ALIBI":
            not_carried("pos_encoding_mode='ALIBI' of a cascade", "a level does not know where its keys are")
        arrays = (qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len)
        for i, (qo, indptr, indices, last, level) in enumerate(zip(*arrays, self._levels, strict=True)):
            level.plan(
                qo,
                indptr,
                indices,
                last,
                num_qo_heads,
                num_kv_heads,
                head_dim,
                page_size,
                causal=causal and i == len(self._levels) - 1,
                pos_encoding_mode=pos_encoding_mode,
                sm_scale=sm_scale,
                logits_soft_cap=logits_soft_cap,
                q_data_type=q_data_type,
                kv_data_type=kv_data_type,
            )

    begin_forward = plan

    def run(self, q: Tensor, paged_kv_cache: PagedCache) -> Tensor:
        """out [tokens, heads, dim]."""
        states = [level.run(q, paged_kv_cache, return_lse=True) for level in self._levels]
        return states[0][0] if len(states) == 1 else merge(states)[0]

    forward = run


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper:
    """One contiguous prefix, and each request's own pages."""

    def __init__(self, float_workspace_buffer: Tensor | None, kv_layout: str = "NHD") -> None:
        self._kv_layout = kv_layout
        self._own = BatchDecodeWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        """Nothing to do: plans live in memory of their own."""

    def begin_forward(
        self,
        unique_kv_indptr: Tensor,
        unique_kv_indices: Tensor,
        unique_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        data_type: str | torch.dtype = "float16",
    ) -> None:
        table = (unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len)
        self._own.plan(*table, num_qo_heads, num_kv_heads, head_dim, page_size, q_data_type=data_type)

    def forward(self, q: Tensor, k_shared: Tensor, v_shared: Tensor, unique_kv_cache: PagedCache) -> Tensor:
        prefix = single_prefill_with_kv_cache(q, k_shared, v_shared, kv_layout=self._kv_layout, return_lse=True)
        return merge([prefix, self._own.run(q, unique_kv_cache, return_lse=True)])[0]

    def end_forward(self) -> None:
        """Nothing to do."""


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper:
    """One contiguous prefix, and each request's own pages, with several queries a request."""

    def __init__(self, float_workspace_buffer: Tensor | None, kv_layout: str = "NHD") -> None:
        self._kv_layout = kv_layout
        self._own = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        """Nothing to do: plans live in memory of their own."""

    def begin_forward(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
    ) -> None:
        table = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._own.plan(*table, num_qo_heads, num_kv_heads, head_dim, page_size)

    def forward(
        self,
        q: Tensor,
        k_shared: Tensor,
        v_shared: Tensor,
        unique_kv_cache: PagedCache,
        causal: bool = False,
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Tensor:
        shared = (q, k_shared, v_shared)
        prefix = single_prefill_with_kv_cache(*shared, kv_layout=self._kv_layout, sm_scale=sm_scale, return_lse=True)
        own = self._own.forward_return_lse(q, unique_kv_cache, causal=causal, sm_scale=sm_scale)
        return merge([prefix, own])[0]

    def end_forward(self) -> None:
        """Nothing to do."""


__all__ = [
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
]
