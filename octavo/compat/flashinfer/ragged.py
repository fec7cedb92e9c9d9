"""flashinfer.prefill's wrapper over contiguous keys, which are pages of one key each. LSE in base 2."""

import functools
from typing import Any

from octavo.compat.arguments import is_one, refuse
from octavo.compat.flashinfer.prefill_base import DType, PrefillWrapper, Result
from octavo.compat.flashinfer.tables import PagedCache, ragged_batch, ragged_kv
from octavo.compat.flashinfer.wrapper import Dtypes
from octavo.shapes import Indptr, Queries, Tensor


class BatchPrefillWithRaggedKVCacheWrapper(PrefillWrapper):
    """Queries of several sequences, each over its own rows of k and v."""

    def __init__(
        self,
        float_workspace_buffer: Tensor | None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        kv_indptr_buf: Tensor | None = None,
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
        self._fixed(qo_indptr_buf=qo_indptr_buf, kv_indptr_buf=kv_indptr_buf)
        self._num_keys = -1

    def plan(
        self,
        qo_indptr: Indptr,
        kv_indptr: Indptr,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
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
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: Tensor | None = None,
        o_indptr: Tensor | None = None,
    ) -> None:
        """One step's offsets and static options. Offsets may be on the host or the device; nothing waits for either."""
        refuse(prefix_len_ptr=prefix_len_ptr, token_pos_in_items_ptr=token_pos_in_items_ptr)
        refuse(token_pos_in_items_len=token_pos_in_items_len, max_item_len_ptr=max_item_len_ptr)
        refuse(v_indptr=v_indptr, o_indptr=o_indptr)
        masked = custom_mask is not None or packed_custom_mask is not None
        self._choose(
            (num_qo_heads, num_kv_heads),
            (head_dim_qk, head_dim_qk if head_dim_vo is None else head_dim_vo),
            1,
            causal,
            Dtypes.of(q_data_type, kv_data_type, o_data_type),
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            masked=masked,
        )
        self._causal = causal
        self._masks = custom_mask, packed_custom_mask
        self._invariant = disable_split_kv or (fixed_split_size or -1) > 0
        on_host = qo_indptr.device.type == "cpu"
        self._rows = int(qo_indptr[-1]) if on_host else None
        known = int(kv_indptr[-1]) if kv_indptr.device.type == "cpu" else -1
        self._offsets = self._place("qo_indptr_buf", qo_indptr), self._place("kv_indptr_buf", kv_indptr)
        self._set(max(known, self._num_keys) if self._use_cuda_graph else known)

    begin_forward = plan

    def _set(self, num_keys: int) -> None:
        """Plan for k and v of up to `num_keys` rows; not known yet if negative."""
        assert self._spec is not None
        self._num_keys = num_keys
        if num_keys >= 0:
            batch = ragged_batch(*self._offsets, num_keys)
            kv_indptr = self._offsets[1]
            batch = self._masked(batch, *self._masks, kv_indptr[1:] - kv_indptr[:-1])
            self._attention.set(batch, self._spec, self._rows, self._invariant)

    def run(
        self,
        q: Queries,
        k: Tensor,
        v: Tensor,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        o_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        kv_cache_sf: PagedCache | None = None,
    ) -> Result:
        """out [tokens, qo_heads, value_dim] and, with return_lse, lse [tokens, qo_heads] float32.

        k, v: [keys, kv_heads, dim] (NHD) or [kv_heads, keys, dim] (HND).
        """
        refuse(args=args, kv_cache_sf=kv_cache_sf, o_scale=None if is_one(o_scale) else o_scale)
        kv = ragged_kv(k, v, self._kv_layout)
        if self._spec is not None and kv.num_pages > self._num_keys:
            self._set(kv.num_pages)
        scales: dict[str, Any] = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        return self._run(q, kv, out=out, lse=lse, return_lse=return_lse, **scales)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(
        self,
        q: Queries,
        k: Tensor,
        v: Tensor,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
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
        return self._forward((q, k, v), options, return_lse=return_lse)

    forward_return_lse = functools.partialmethod(forward, return_lse=True)
