"""What FlashInfer's wrappers have in common: what plan() fixes, and how run() hands it to a planned attention."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from octavo.compat.arguments import default_scale, dtype_of, not_carried, refuse, scale_of, scale_values, spec_for
from octavo.compat.flashinfer.tables import Position, check_backend, check_layout
from octavo.compat.planned import PlannedAttention
from octavo.kv_cache import PagedKV
from octavo.problem import AttentionSpec
from octavo.shapes import Tensor


@dataclass(frozen=True)
class Dtypes:
    """Of q, K/V and out, each as FlashInfer's plan takes them."""

    q: torch.dtype
    kv: torch.dtype

    @classmethod
    def of(
        cls, q: str | torch.dtype | None, kv: str | torch.dtype | None, o: str | torch.dtype | None = None
    ) -> "Dtypes":
        q_dtype = dtype_of("float16" if q is None else q)
        if o is not None and dtype_of(o) != q_dtype:
            not_carried(f"o_data_type={o}", f"out has q's dtype, {q_dtype}; cast it after the call")
        return cls(q_dtype, q_dtype if kv is None else dtype_of(kv))


class Wrapper:
    """A wrapper's device, layout, plan and attention.

    The workspace buffer only says the device: plans live in memory of their own, of which any batch needs little.
    """

    def __init__(
        self,
        float_workspace_buffer: Tensor | None,
        kv_layout: str,
        use_cuda_graph: bool,
        backend: str = "auto",
        **not_served: Any,
    ) -> None:
        refuse(**not_served)
        self._backend = check_backend(backend)
        self._kv_layout = check_layout(kv_layout)
        self._use_cuda_graph = use_cuda_graph
        default = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(default) if float_workspace_buffer is None else float_workspace_buffer.device
        self._attention = PlannedAttention(self.device, use_cuda_graph)
        self._spec: AttentionSpec | None = None
        self._rechoose: Callable[..., AttentionSpec] = self._choose
        self._sm_scale: float | None = None
        self._position = Position(False)
        self._window_left, self._logits_soft_cap = -1, 0.0

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._use_cuda_graph

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        """Nothing to do: plans live in memory of their own."""

    def end_forward(self) -> None:
        """Nothing to do."""

    def _choose(
        self,
        heads: tuple[int, int],
        dims: tuple[int, int],
        page_size: int,
        causal: bool,
        dtypes: Dtypes,
        *,
        pos_encoding_mode: str,
        window_left: int,
        logits_soft_cap: float | None,
        sm_scale: float | None,
        masked: bool = False,
    ) -> AttentionSpec:
        """The spec of a plan; also what later runs need of it."""
        position = Position.of(pos_encoding_mode)
        window_left, logits_soft_cap = max(window_left, -1), logits_soft_cap or 0.0
        spec = spec_for(
            heads,
            dims,
            page_size,
            causal and not masked,
            dtypes.q,
            dtypes.kv,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            alibi=position.alibi,
            custom_mask=masked,
        )
        self._rechoose = functools.partial(self._choose, heads, dims, page_size, dtypes=dtypes, masked=masked)
        self._position, self._sm_scale = position, sm_scale
        self._window_left, self._logits_soft_cap = window_left, logits_soft_cap
        self._spec = spec
        return spec

    def _run(
        self,
        q: Tensor,
        kv: PagedKV,
        *,
        out: Tensor | None,
        lse: Tensor | None,
        return_lse: bool,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        q_scale: float | Tensor | None = None,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
    ) -> Any:
        if self._spec is None:
            raise RuntimeError("run: expected a plan, got none; fix: call plan() first")
        spec = self._spec
        if window_left is not None and max(window_left, -1) != self._window_left:
            spec = replace(spec, window_left=max(window_left, -1))
        if sinks is not None:
            spec = replace(spec, sinks=True)
        result, made = self._attention.run(
            spec,
            q,
            kv,
            out,
            lse if return_lse else None,
            sm_scale=scale_of(default_scale(self._sm_scale, q.shape[-1]), q_scale, k_scale),
            sinks=sinks,
            alibi_slopes=self._position.slopes(spec, q.device),
        )
        scale_values(result, v_scale)
        return (result, made) if return_lse else result
