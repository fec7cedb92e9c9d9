"""Which device a tensor lives on, as the value that kernels are chosen for."""

import functools
import os

import torch

from octavo.errors import input_error
from octavo.problem import Arch


def interpreting() -> bool:
    """Whether Triton kernels run under Triton's interpreter (read by Triton when it decorates a kernel)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@functools.lru_cache(maxsize=64)
def _gpu(index: int) -> Arch:
    properties = torch.cuda.get_device_properties(index)
    kind = "hip" if torch.version.hip else "cuda"
    return Arch(kind, (properties.major, properties.minor), properties.multi_processor_count, properties.name)


def arch_of(device: torch.device) -> Arch:
    """The Arch of a torch device. Raises ValueError for devices other than CPU and CUDA (or ROCm)."""
    if device.type == "cuda":
        return _gpu(torch.cuda.current_device() if device.index is None else device.index)
    if device.type == "cpu":
        return Arch("interpreter" if interpreting() else "cpu")
    raise input_error("device", "cpu or cuda tensors", device, "move them to one of these")
