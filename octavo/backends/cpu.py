"""CPU: pages gathered once per sequence, then PyTorch's own attention; no tokens x keys mask is ever built."""

import math
from collections.abc import Callable

import torch

from octavo.backends import cpu_attention, cpu_variants
from octavo.backends.base import AttentionCall, Prepared
from octavo.backends.cpu_pages import sequences_of
from octavo.backends.cpu_tiles import fold_state
from octavo.errors import fail
from octavo.planning.form import PlanForm
from octavo.problem import Arch, AttentionSpec, PagedBatch
from octavo.shapes import Tensor

MERGED_ELEMENTS = 1 << 18
"""Elements merged at a time: their float32 copies stay in the second-level cache."""


class CpuBackend:
    name = "cpu"

    def reject(self, spec: AttentionSpec | None, arch: Arch) -> str | None:
        return None if arch.kind in ("cpu", "interpreter") else "tensors are on a GPU"

    def plan_form(
        self, spec: AttentionSpec, num_tokens: int, batch: PagedBatch, arch: Arch, batch_invariant: bool = False
    ) -> None:
        return None

    def plan_words(self, spec: AttentionSpec, num_tokens: int, num_sequences: int, form: PlanForm) -> int:
        return 0

    def max_plan_words(
        self, spec: AttentionSpec, num_tokens: int, num_sequences: int, arch: Arch, batch_invariant: bool = False
    ) -> int:
        return 0

    def plan(self, spec: AttentionSpec, batch: PagedBatch, num_tokens: int, form: PlanForm, plan: Tensor) -> None:
        raise ValueError("plan: the CPU backend makes no device plan")

    def prepare_plan(
        self, spec: AttentionSpec, batch: PagedBatch, num_tokens: int, form: PlanForm, words: int
    ) -> Callable[[PagedBatch, Tensor], None]:
        raise ValueError("plan: the CPU backend makes no device plan")

    def attend(self, call: AttentionCall) -> None:
        if call.spec.is_plain:
            cpu_attention.attend(call)
        else:
            cpu_variants.attend(call)

    def prepare(self, call: AttentionCall) -> Prepared:
        return self.attend

    def append(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch) -> None:
        page_size = k_cache.shape[1]
        rows, pages, slots = [], [], []
        for s in sequences_of(batch, page_size):
            written = min(s.q_len, s.kv_len)
            positions = torch.arange(s.kv_len - written, s.kv_len)
            rows.append(torch.arange(s.start + s.q_len - written, s.start + s.q_len))
            pages.append(s.page_ids[positions // page_size].long())
            slots.append(positions % page_size)
        if not rows:
            return
        row, page, slot = torch.cat(rows), torch.cat(pages), torch.cat(slots)
        if page.numel() and not 0 <= int(page.min()) <= int(page.max()) < k_cache.shape[0]:
            got = f"{int(page.min())} to {int(page.max())}"
            fail("page ids", f"0 to {k_cache.shape[0] - 1}", got, "ids index the cache")
        k_cache[page, slot] = k[row]
        v_cache[page, slot] = v[row]

    def merge(self, outs: list[Tensor], lses: list[Tensor], out: Tensor, lse: Tensor) -> None:
        step = max(1, MERGED_ELEMENTS // max(1, out[:1].numel()))
        for low in range(0, out.shape[0], step):
            rows = slice(low, low + step)
            total, total_lse = torch.zeros(out[rows].shape), torch.full(lse[rows].shape, -math.inf)
            part = torch.empty_like(total)
            for x, x_lse in zip(outs, lses, strict=True):
                fold_state(total, total_lse, x[rows], x_lse[rows], part)
            out[rows], lse[rows] = total, total_lse
