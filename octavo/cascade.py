"""Attention over shared prefixes: each level of keys is read once for all tokens that share it, then states merge."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from octavo.api import attend
from octavo.batch_attention import BatchAttention
from octavo.errors import fail
from octavo.kv_cache import PagedKV
from octavo.merge import merge
from octavo.problem import AttentionSpec, PagedBatch
from octavo.shapes import LogSumExp, Output, Queries, Tensor


def cascade(
    q: Queries,
    kv: PagedKV,
    levels: Sequence[PagedBatch],
    *,
    sm_scale: float | Tensor | None = None,
    causal: bool = True,
    batch_invariant: bool = False,
    validate: bool = False,
    backend: str | None = None,
) -> tuple[Output, LogSumExp]:
    """Attention of every row over its keys of all levels, as if each sequence listed them all itself.

    The levels cut a sequence's keys: first what is shared most widely, last what is its own. A level is a batch over
    the same rows of q whose qo_indptr groups the rows that share its keys; all rows of a group see all of its keys.
    The last level holds each sequence's own keys and its causal mask. Rows of no group, and groups without keys, see
    nothing at that level.

    Args:
        q: [tokens, qo_heads, head_dim].
        kv: the one cache that all levels' pages are in.
        levels: one or more batches over q's rows, the most widely shared first.
        causal: of the last level: query i of a sequence sees its own keys j <= i + kv_len - q_len. All of a sequence's
            queries must then be among its own keys, as they are after `append`.
        sm_scale, batch_invariant, validate, backend: as in `attend`.

    Returns:
        (out [tokens, qo_heads, value_dim], lse [tokens, qo_heads] float32, base 2).

    >>> import torch
    >>> q, cache = torch.zeros(2, 4, 16), torch.zeros(8, 1, 2, 16)
    >>> prefix = PagedBatch.csr(torch.tensor([0, 2]), torch.tensor([0, 5]), torch.tensor([0, 1, 2, 3, 4]))
    >>> own = PagedBatch.csr(torch.tensor([0, 1, 2]), torch.tensor([0, 1, 3]), torch.tensor([5, 6, 7]))
    >>> out, lse = cascade(q, PagedKV(cache, cache), [prefix, own])
    >>> lse[:, 0].exp2().round().tolist()  # 5 shared keys and 1 or 2 of their own
    [6.0, 7.0]
    """
    _check_levels(levels)
    last = len(levels) - 1
    states = [
        attend(
            q,
            kv,
            level,
            sm_scale=sm_scale,
            causal=causal and i == last,
            batch_invariant=batch_invariant,
            validate=validate,
            backend=backend,
        )
        for i, level in enumerate(levels)
    ]
    return states[0] if last == 0 else merge(states)


class CascadeAttention:
    """`cascade` with plans: made once per step, one for each level, and used by every layer.

    Args:
        spec: the problem as one sequence sees it. Its causal mask is the last level's; the others have none.
        num_levels: levels of every batch, 1 or more.
        device, max_tokens, max_sequences, batch_invariant, backend: of each level's BatchAttention.

    Raises:
        ValueError: also for what depends on a key's position in the whole sequence, which a level does not know.

    >>> import torch
    >>> spec = AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
    >>> attn = CascadeAttention(spec, 2, device="cpu")
    >>> prefix = PagedBatch.csr(torch.tensor([0, 2]), torch.tensor([0, 2]), torch.tensor([0, 1]))
    >>> own = PagedBatch.csr(torch.tensor([0, 1, 2]), torch.tensor([0, 1, 2]), torch.tensor([2, 3]))
    >>> attn.plan([prefix, own])
    >>> cache = torch.zeros(4, 1, 2, 16)
    >>> attn.run(torch.zeros(2, 4, 16), PagedKV(cache, cache))[1][:, 0].exp2().tolist()
    [3.0, 3.0]
    """

    def __init__(
        self,
        spec: AttentionSpec,
        num_levels: int,
        *,
        device: torch.device | str | None = None,
        max_tokens: int | None = None,
        max_sequences: int | None = None,
        batch_invariant: bool = False,
        backend: str | None = None,
    ) -> None:
        if num_levels < 1:
            fail("num_levels", "at least 1", num_levels, "pass the number of batches given to plan")
        self.spec = spec
        self.levels = tuple(
            BatchAttention(
                spec if i == num_levels - 1 else replace(spec, causal=False),
                device=device,
                max_tokens=max_tokens,
                max_sequences=max_sequences,
                batch_invariant=batch_invariant,
                backend=backend,
            )
            for i in range(num_levels)
        )

    def plan(self, levels: Sequence[PagedBatch], num_tokens: int | None = None, *, validate: bool = False) -> None:
        """Plan one step, on the device, without a host synchronisation.

        Args:
            levels: as in `cascade`, as many as num_levels; kept by reference.
            num_tokens: rows that q will have at most; None means max_tokens (on the CPU, the most that a level says).
            validate: also check index values on a GPU, which synchronises.
        """
        _check_levels(levels)
        if len(levels) != len(self.levels):
            fail("levels", f"{len(self.levels)} batches, as num_levels says", len(levels), "pass one batch a level")
        if num_tokens is None and levels[0].device.type == "cpu":
            num_tokens = max(int(level.qo_indptr[-1]) for level in levels)
        for attention, level in zip(self.levels, levels, strict=True):
            attention.plan(level, num_tokens, validate=validate)

    def run(self, q: Queries, kv: PagedKV, *, sm_scale: float | Tensor | None = None) -> tuple[Output, LogSumExp]:
        """(out, lse) of one layer under the current plans; arguments as in `cascade`."""
        states = [attention.run(q, kv, sm_scale=sm_scale) for attention in self.levels]
        return states[0] if len(states) == 1 else merge(states)


def _check_levels(levels: Sequence[PagedBatch]) -> None:
    if not levels:
        fail("levels", "one or more batches", "none", "pass the shared prefix and the sequences' own keys")
    for i, level in enumerate(levels):
        if not isinstance(level, PagedBatch):
            fail(
                f"levels[{i}]", "a PagedBatch", type(level).__name__, "build it with PagedBatch.csr or dense", TypeError
            )


__all__ = ["CascadeAttention", "cascade"]
