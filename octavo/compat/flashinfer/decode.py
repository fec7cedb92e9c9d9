"""flashinfer.decode: one query a sequence, or a few. Through the same attention as prefill. LSE in base 2."""

import functools
from typing import Any

import torch

from octavo.compat.arguments import not_carried, place, refuse, steps
from octavo.compat.flashinfer.single import single_decode_with_kv_cache
from octavo.compat.flashinfer.tables import PagedCache, paged_kv
from octavo.compat.flashinfer.wrapper import Dtypes, Wrapper
from octavo.problem import PagedBatch
from octavo.shapes import Indptr, PageIds, PerSequence, Queries, Tensor

DType = str | torch.dtype
Scale = float | Tensor
Result = Any
"""out, or (out, lse) with return_lse."""

POSITIONAL = (
    "pos_encoding_mode",
    "window_left",
    "logits_soft_cap",
    "q_data_type",
    "kv_data_type",
    "o_data_type",
    "data_type",
    "sm_scale",
    "rope_scale",
    "rope_theta",
    "non_blocking",
    "block_tables",
    "seq_lens",
    "fixed_split_size",
    "disable_split_kv",
    "q_len_per_req",
)
"""Names of plan()'s optional arguments in the order in which it takes them after page_size."""


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    """q_len_per_req queries (one) of each sequence over a paged cache; several are causal among themselves."""

    def __init__(
        self,
        float_workspace_buffer: Tensor | None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, jit_args=jit_args)
        buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        if use_cuda_graph and any(x is None for x in buffers):
            raise ValueError("buffers: expected three tensors with use_cuda_graph; fix: pass indptr, indices, lengths")
        self._use_tensor_cores = use_tensor_cores
        self._paged_kv_indptr_buf, self._paged_kv_indices_buf, self._paged_kv_last_page_len_buf = buffers
        self._qo_indptr_buf: Tensor | None = None
        self._q_len_per_req = 1

    @property
    def use_tensor_cores(self) -> bool:
        return self._use_tensor_cores

    def workspace_size(self, *plan_args: Any, **plan_kwargs: Any) -> tuple[int, int]:
        """Bytes of float and int workspace that such a plan needs of the caller: none."""
        return 0, 0

    def plan(
        self,
        indptr: Indptr,
        indices: PageIds,
        last_page_len: PerSequence,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *deprecated_positional_args: Any,
        **kwargs: Any,
    ) -> None:
        """One step's tables and static options. Tables may be on the host or the device; nothing waits for either."""
        options = dict(zip(POSITIONAL, deprecated_positional_args, strict=False))
        twice = options.keys() & kwargs.keys()
        if twice or len(deprecated_positional_args) > len(POSITIONAL):
            raise TypeError(f"plan: expected each argument once, got {sorted(twice)} again; fix: pass them by name")
        heads = num_qo_heads, num_kv_heads
        self._plan((indptr, indices, last_page_len), heads, head_dim, page_size, **options, **kwargs)

    begin_forward = plan

    def _plan(
        self,
        table: tuple[Tensor, Tensor, Tensor],
        heads: tuple[int, int],
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        window_right: int = 0,
        logits_soft_cap: float | None = None,
        q_data_type: DType | None = "float16",
        kv_data_type: DType | None = None,
        o_data_type: DType | None = None,
        data_type: DType | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
    ) -> None:
        if window_right != 0:
            not_carried("window_right", "a decoded token sees no later keys")
        if q_len_per_req < 1:
            raise ValueError(f"q_len_per_req: expected at least 1, got {q_len_per_req}; fix: the tokens of a request")
        q_type, kv_type = q_data_type or data_type, kv_data_type or data_type
        options: dict[str, Any] = {"pos_encoding_mode": pos_encoding_mode, "window_left": window_left}
        options |= {"logits_soft_cap": logits_soft_cap, "sm_scale": sm_scale}
        dtypes = Dtypes.of(q_type, kv_type, o_data_type)
        spec = self._choose(heads, (head_dim, head_dim), page_size, True, dtypes, **options)
        count = table[2].shape[0]
        self._place(table, count, q_len_per_req)
        assert self._qo_indptr_buf is not None and self._paged_kv_indptr_buf is not None
        assert self._paged_kv_indices_buf is not None
        batch = PagedBatch.csr(
            self._qo_indptr_buf,
            self._paged_kv_indptr_buf,
            self._paged_kv_indices_buf,
            self._paged_kv_last_page_len_buf,
        )
        invariant = disable_split_kv or (fixed_split_size or -1) > 0
        self._attention.set(batch, spec, count * q_len_per_req, invariant)

    def _place(self, table: tuple[Tensor, Tensor, Tensor], count: int, q_len: int) -> None:
        """The table on the device; in the fixed buffers under use_cuda_graph, which also fixes the batch's shape."""
        wanted = (count + 1, q_len)
        planned = None if self._qo_indptr_buf is None else (self._qo_indptr_buf.shape[0], self._q_len_per_req)
        if self._use_cuda_graph:
            assert self._paged_kv_last_page_len_buf is not None
            room = self._paged_kv_last_page_len_buf.shape[0]
            if count != room or (planned is not None and planned != wanted):
                got = f"{count} sequences of q_len_per_req={q_len}"
                raise ValueError(f"plan: the batch is frozen by use_cuda_graph, got {got}; fix: a wrapper per shape")
        buffers = (self._paged_kv_indptr_buf, self._paged_kv_indices_buf, self._paged_kv_last_page_len_buf)
        placed = [
            place(x, buffer if self._use_cuda_graph else None, self.device)
            for x, buffer in zip(table, buffers, strict=True)
        ]
        self._paged_kv_indptr_buf, self._paged_kv_indices_buf, self._paged_kv_last_page_len_buf = placed
        if planned != wanted:
            self._qo_indptr_buf = steps(count + 1, q_len, self.device)
        self._q_len_per_req = q_len

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
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: PagedCache | None = None,
    ) -> Result:
        """q [sequences * q_len_per_req, qo_heads, dim] to out of that shape, and lse [..., qo_heads] float32."""
        refuse(args=args, kv_cache_sf=kv_cache_sf)
        refuse(skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor)
        if self._qo_indptr_buf is not None:
            rows = (self._qo_indptr_buf.shape[0] - 1) * self._q_len_per_req
            if q.shape[0] != rows or q_len_per_req not in (None, self._q_len_per_req):
                raise ValueError(
                    f"q: expected {rows} rows as planned with q_len_per_req={self._q_len_per_req}, got {q.shape[0]}; "
                    "fix: plan with the q_len_per_req of q"
                )
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
        pos_encoding_mode: str = "NONE",
        q_scale: float | None = None,
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
        """Deprecated spelling of `run`, with options that plan() takes now; those given here count."""
        options = {"pos_encoding_mode": pos_encoding_mode, "window_left": window_left, "sm_scale": sm_scale}
        self._rechoose(causal=True, logits_soft_cap=logits_soft_cap, **options)
        scales: dict[str, Any] = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        return self.run(q, paged_kv_cache, return_lse=return_lse, **scales)

    forward_return_lse = functools.partialmethod(forward, return_lse=True)


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """A decode wrapper whose tables lie in the given buffers, of one batch size, for graphs to read."""

    def __init__(
        self,
        workspace_buffer: Tensor | None,
        indptr_buffer: Tensor,
        indices_buffer: Tensor,
        last_page_len_buffer: Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        buffers = (indptr_buffer, indices_buffer, last_page_len_buffer)
        super().__init__(workspace_buffer, kv_layout, True, use_tensor_cores, *buffers)


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper,
    indptr: Indptr,
    indices: PageIds,
    last_page_len: PerSequence,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    q_data_type: DType | None = None,
    kv_data_type: DType | None = None,
    data_type: DType | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    q_len_per_req: int = 1,
    global_override_indptr_cpu: Tensor | None = None,
) -> None:
    """The wrapper's `plan`, which is this fast already: it reads nothing from the device."""
    BatchDecodeWithPagedKVCacheWrapper.plan(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        pos_encoding_mode=pos_encoding_mode,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        q_data_type=q_data_type,
        kv_data_type=kv_data_type,
        data_type=data_type,
        sm_scale=sm_scale,
        fixed_split_size=fixed_split_size,
        disable_split_kv=disable_split_kv,
        q_len_per_req=q_len_per_req,
    )


__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "fast_decode_plan",
    "single_decode_with_kv_cache",
]
