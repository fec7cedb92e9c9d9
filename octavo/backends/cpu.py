"""CPU: pages gathered once per sequence, then PyTorch's own attention; no tokens x keys mask is ever built."""

import math

import torch

from octavo.backends.base import AttentionCall
from octavo.problem import Arch, AttentionSpec, PagedBatch
from octavo.shapes import Tensor


class CpuBackend:
    name = "cpu"

    def reject(self, spec: AttentionSpec | None, arch: Arch) -> str | None:
        return None if arch.kind in ("cpu", "interpreter") else "tensors are on a GPU"

    def block_m(self, spec: AttentionSpec, num_tokens: int, num_sequences: int) -> int:
        return 0

    def plan_words(self, spec: AttentionSpec, num_tokens: int, num_sequences: int, block_m: int) -> int:
        return 0

    def plan(self, spec: AttentionSpec, batch: PagedBatch, num_tokens: int, block_m: int, plan: Tensor) -> None:
        raise ValueError("plan: the CPU backend makes no device plan")

    def attend(self, call: AttentionCall) -> None:
        raise NotImplementedError

    def append(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch) -> None:
        raise NotImplementedError

    def merge(self, outs: list[Tensor], lses: list[Tensor], out: Tensor, lse: Tensor) -> None:
        raise NotImplementedError
