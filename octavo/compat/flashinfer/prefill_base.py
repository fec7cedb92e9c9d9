"""What the paged and the ragged prefill wrapper share."""

from typing import Any

import torch

from octavo.compat.arguments import place, to_device
from octavo.compat.flashinfer.masks import byte_offsets, pack, with_mask
from octavo.compat.flashinfer.wrapper import Wrapper
from octavo.problem import PagedBatch
from octavo.shapes import Tensor

DType = str | torch.dtype
Scale = float | Tensor
Result = Any
"""out, or (out, lse) with return_lse."""


class PrefillWrapper(Wrapper):
    """Fixed buffers, masks and the deprecated spellings."""

    _causal = False
    _mask_buffers: tuple[Tensor | None, Tensor | None]

    def _fixed(self, **buffers: Tensor | None) -> None:
        """Buffers that graphs read: required with use_cuda_graph, unused without."""
        for name, buffer in buffers.items():
            if self._use_cuda_graph and buffer is None:
                raise ValueError(f"{name}: expected a tensor with use_cuda_graph, got None; fix: pass the buffer")
            setattr(self, f"_{name}", buffer if self._use_cuda_graph else None)

    def _place(self, name: str, x: Tensor) -> Tensor:
        """x on the device; in its fixed buffer under use_cuda_graph."""
        buffer = getattr(self, f"_{name}")
        placed = place(x, buffer if self._use_cuda_graph else None, self.device)
        setattr(self, f"_{name}", placed)
        return placed

    def _masked(
        self, batch: PagedBatch, custom_mask: Tensor | None, packed: Tensor | None, kv_lens: Tensor
    ) -> PagedBatch:
        """The batch under its mask; a graph's lies in custom_mask_buf, packed, and mask_indptr_buf."""
        if custom_mask is None and packed is None:
            return batch
        masks = [None if x is None else to_device(x, self.device) for x in (custom_mask, packed)]
        if not self._use_cuda_graph:
            return with_mask(batch, *masks)
        buffers = self._mask_buffers
        if buffers[0] is None or buffers[1] is None:
            raise ValueError("custom_mask_buf, mask_indptr_buf: two tensors needed with use_cuda_graph; fix: pass both")
        sizes = (batch.qo_indptr[1:] - batch.qo_indptr[:-1]) * kv_lens
        bits = pack(masks[0], sizes) if masks[1] is None and masks[0] is not None else masks[1]
        assert bits is not None
        count = min(len(bits), len(buffers[0]))
        buffers[0][:count].copy_(bits[:count])
        buffers[1].copy_(byte_offsets(sizes))
        return with_mask(batch, None, *buffers)

    def _forward(self, tensors: tuple[Any, ...], options: dict[str, Any], **run_options: Any) -> Result:
        """`run` with options that plan() takes now; those given here count."""
        self._rechoose(**options)
        self._causal = options["causal"]
        return self.run(*tensors, **run_options)

    def run(self, *tensors: Any, **options: Any) -> Result:
        raise NotImplementedError
