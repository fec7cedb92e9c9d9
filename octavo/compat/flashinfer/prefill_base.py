"""What the paged and the ragged prefill wrapper share."""

from typing import Any

import torch

from octavo.compat.arguments import place, refuse
from octavo.compat.flashinfer.wrapper import Wrapper
from octavo.shapes import Tensor

DType = str | torch.dtype
Scale = float | Tensor
Result = Any
"""out, or (out, lse) with return_lse."""


class PrefillWrapper(Wrapper):
    """Fixed buffers, masks and the deprecated spellings."""

    _causal = False

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

    def _place_mask(self, custom_mask: Tensor | None, packed: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """(bool, packed) masks on the device; a graph's mask lies in custom_mask_buf, packed."""
        if self._use_cuda_graph and (custom_mask is not None or packed is not None):
            refuse(custom_mask_with_use_cuda_graph=True)
        moved = [None if x is None else place(x, None, self.device) for x in (custom_mask, packed)]
        return moved[0], moved[1]

    def _forward(self, tensors: tuple[Any, ...], options: dict[str, Any], **run_options: Any) -> Result:
        """`run` with options that plan() takes now; those given here count."""
        self._rechoose(**options)
        self._causal = options["causal"]
        return self.run(*tensors, **run_options)

    def run(self, *tensors: Any, **options: Any) -> Result:
        raise NotImplementedError
