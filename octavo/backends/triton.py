"""Portable Triton backend: launchers."""

from octavo.backends.base import AttentionCall
from octavo.problem import Arch, AttentionSpec, PagedBatch
from octavo.shapes import Tensor


class TritonBackend:
    name = "triton"

    def reject(self, spec: AttentionSpec | None, arch: Arch) -> str | None:
        return None if arch.kind in ("cuda", "hip", "interpreter") else "needs a GPU"

    def block_m(self, spec: AttentionSpec, num_tokens: int, num_sequences: int) -> int:
        return 16

    def plan_words(self, spec: AttentionSpec, num_tokens: int, num_sequences: int, block_m: int) -> int:
        return 0

    def plan(self, spec: AttentionSpec, batch: PagedBatch, num_tokens: int, block_m: int, plan: Tensor) -> None: ...
    def attend(self, call: AttentionCall) -> None: ...
    def append(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch) -> None: ...
    def merge(self, outs: list[Tensor], lses: list[Tensor], out: Tensor, lse: Tensor) -> None: ...
