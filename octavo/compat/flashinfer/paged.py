"""flashinfer.prefill's wrapper over paged caches. LSE in base 2."""

import functools
from typing import Any

from octavo.compat.arguments import refuse
from octavo.compat.flashinfer.page import get_seq_lens
from octavo.compat.flashinfer.prefill_base import DType, PrefillWrapper, Result, Scale
from octavo.compat.flashinfer.tables import PagedCache, paged_kv
from octavo.compat.flashinfer.wrapper import Dtypes
from octavo.problem import PagedBatch
from octavo.shapes import Indptr, PageIds, PerSequence, Queries, Tensor


class BatchPrefillWithPagedKVCacheWrapper(PrefillWrapper):
    """Queries of several sequences over a paged cache.

    >>> import torch
    >>> wrapper = BatchPrefillWithPagedKVCacheWrapper(torch.empty(0))
    >>> one = torch.tensor([0, 2], dtype=torch.int32)
    >>> last = torch.tensor([3], dtype=torch.int32)
    >>> wrapper.plan(one, one, one[:2], last, 4, 2, 64, 16, causal=True, q_data_type="float32")
    >>> wrapper.run(torch.zeros(2, 4, 64), torch.zeros(8, 2, 16, 2, 64)).shape
    torch.Size([2, 4, 64])
    """

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
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(
            float_workspace_buffer, kv_layout, use_cuda_graph, backend, jit_args=jit_args, jit_kwargs=jit_kwargs
        )
        self._mask_buffers = custom_mask_buf, mask_indptr_buf
        self._fixed(
            qo_indptr_buf=qo_indptr_buf,
            paged_kv_indptr_buf=paged_kv_indptr_buf,
            paged_kv_indices_buf=paged_kv_indices_buf,
            paged_kv_last_page_len_buf=paged_kv_last_page_len_buf,
        )

    _paged_kv_indptr_buf: Tensor
    _paged_kv_last_page_len_buf: Tensor

    def workspace_size(self, *plan_args: Any, **plan_kwargs: Any) -> tuple[int, int]:
        """Bytes of float and int workspace that such a plan needs of the caller: none."""
        return 0, 0

    def plan(
        self,
        qo_indptr: Indptr,
        paged_kv_indptr: Indptr,
        paged_kv_indices: PageIds,
        paged_kv_last_page_len: PerSequence,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: DType = "float16",
        kv_data_type: DType | None = None,
        o_data_type: DType | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        """One step's tables and static options. Tables may be on the host or the device; nothing waits for either."""
        refuse(prefix_len_ptr=prefix_len_ptr, token_pos_in_items_ptr=token_pos_in_items_ptr)
        refuse(token_pos_in_items_len=token_pos_in_items_len, max_item_len_ptr=max_item_len_ptr)
        masked = custom_mask is not None or packed_custom_mask is not None
        spec = self._choose(
            (num_qo_heads, num_kv_heads),
            (head_dim_qk, head_dim_qk if head_dim_vo is None else head_dim_vo),
            page_size,
            causal,
            Dtypes.of(q_data_type, kv_data_type, o_data_type),
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            masked=masked,
        )
        self._causal = causal
        rows = int(qo_indptr[-1]) if qo_indptr.device.type == "cpu" else None
        batch = PagedBatch.csr(
            self._place("qo_indptr_buf", qo_indptr),
            self._place("paged_kv_indptr_buf", paged_kv_indptr),
            self._place("paged_kv_indices_buf", paged_kv_indices),
            self._place("paged_kv_last_page_len_buf", paged_kv_last_page_len),
        )
        if masked:
            kv_lens = get_seq_lens(self._paged_kv_indptr_buf, self._paged_kv_last_page_len_buf, page_size)
            batch = self._masked(batch, custom_mask, packed_custom_mask, kv_lens)
        invariant = disable_split_kv or (fixed_split_size or -1) > 0
        self._attention.set(batch, spec, rows, invariant)

    begin_forward = plan

    def run(
        self,
        q: Queries,
        paged_kv_cache: PagedCache,
        *args: Any,
        q_scale: Scale | None = None,
        k_scale: Scale | None = None,
        v_scale: Scale | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        kv_cache_sf: PagedCache | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Result:
        """out [tokens, qo_heads, value_dim], and with return_lse also lse [tokens, qo_heads] float32."""
        refuse(args=args, kv_cache_sf=kv_cache_sf)
        refuse(skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor)
        return self._run(
            q,
            paged_kv(paged_kv_cache, self._kv_layout),
            out=out,
            lse=lse,
            return_lse=return_lse,
            window_left=window_left,
            sinks=sinks,
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
        )

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(
        self,
        q: Queries,
        paged_kv_cache: PagedCache,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        return_lse: bool = False,
    ) -> Result:
        """Deprecated spelling of `run`."""
        options = {"causal": causal, "pos_encoding_mode": pos_encoding_mode, "window_left": window_left}
        options |= {"logits_soft_cap": logits_soft_cap, "sm_scale": sm_scale}
        run_options = {"k_scale": k_scale, "v_scale": v_scale, "return_lse": return_lse}
        return self._forward((q, paged_kv_cache), options, **run_options)

    forward_return_lse = functools.partialmethod(forward, return_lse=True)
