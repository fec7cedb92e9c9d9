"""One planned attention behind every wrapper: planned when q's rows are known, at the latest by the first run."""

from typing import Any, NamedTuple

import torch

from octavo.batch_attention import BatchAttention
from octavo.kv_cache import PagedKV
from octavo.problem import AttentionSpec, PagedBatch
from octavo.shapes import Tensor


class _Planned(NamedTuple):
    """A plan of the current step."""

    spec: AttentionSpec
    attention: BatchAttention
    rows: int


class PlannedAttention:
    """The current step of a wrapper.

    Args:
        device: where the batches live.
        fixed: whether a graph replays `run`: the rows planned for then never fall, so every plan has the form and the
            place that were captured.
    """

    def __init__(self, device: torch.device, fixed: bool = False) -> None:
        self.device = device
        self._fixed, self._most_rows = fixed, 0
        self._attentions: dict[tuple[AttentionSpec, bool], BatchAttention] = {}
        self._planned: dict[AttentionSpec, _Planned] = {}
        self._last: _Planned | None = None
        self._batch: PagedBatch | None = None
        self._batch_invariant = False

    def set(self, batch: PagedBatch, spec: AttentionSpec, rows: int | None, batch_invariant: bool = False) -> None:
        """A new step; planned now if the rows of q are known without reading them from the device."""
        self._batch, self._batch_invariant = batch, batch_invariant
        self._planned.clear()
        self._last = None
        if rows is None and self._fixed:
            rows = self._most_rows or None
        if rows is not None:
            self._plan(spec, rows)

    def _plan(self, spec: AttentionSpec, rows: int) -> None:
        assert self._batch is not None
        if self._fixed:
            rows = self._most_rows = max(rows, self._most_rows)
        key = spec, self._batch_invariant
        if key not in self._attentions:
            options: dict[str, Any] = {"device": self.device, "batch_invariant": self._batch_invariant}
            self._attentions[key] = BatchAttention(spec, **options)
        self._attentions[key].plan(self._batch, num_tokens=rows)
        self._planned[spec] = _Planned(spec, self._attentions[key], rows)

    def _planned_for(self, spec: AttentionSpec, rows: int) -> BatchAttention:
        """The attention planned for `spec` and this many rows; layers pass the same object, which is quick to tell."""
        last = self._last
        if last is None or last.spec is not spec or last.rows < rows:
            last = self._planned.get(spec)
            if last is None or last.rows < rows:
                self._plan(spec, rows)
                last = self._planned[spec]
            self._last = last._replace(spec=spec)
        return last.attention

    def run(
        self,
        spec: AttentionSpec,
        q: Tensor,
        kv: PagedKV,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        **values: Any,
    ) -> tuple[Tensor, Tensor]:
        """(out, lse) of one layer; values: sm_scale and what else BatchAttention.run takes, None for absent."""
        if self._batch is None:
            raise RuntimeError("run: expected a plan, got none; fix: call plan() first")
        attention = self._planned_for(spec, q.shape[0])
        if out is not None and lse is None:
            lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        elif lse is not None and out is None:
            out = q.new_empty((*q.shape[:2], spec.v_dim))
        given = {name: value for name, value in values.items() if value is not None}
        return attention.run(q, kv, out=out, lse=lse, **given)
