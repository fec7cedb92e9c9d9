"""What calls that look alike have in common: the launches of a plan, of attention under it, and of both."""

from collections.abc import Callable

import torch

from octavo.backends.arch import arch_of
from octavo.backends.base import AttentionCall
from octavo.backends.constants import ITEMS_AT_ONCE, OWN_SEQUENCES, plan_options
from octavo.backends.launch import Launcher
from octavo.backends.portable import Tuning, planned, table_dtypes, table_of
from octavo.planning.form import PlanForm
from octavo.planning.schedule import max_items
from octavo.problem import AttentionSpec, PagedBatch
from octavo.shapes import Tensor

MAX_WRITERS = 256

PLAN = Launcher("octavo.kernels.plan", "plan_kernel")

ListRunner = Callable[[AttentionCall, Tensor], None]
"""Attention over one list of the plan given."""


class PlanRun:
    """The planner, for batches that look like `batch`, of at most num_tokens tokens, and plans of so many words."""

    def __init__(
        self, spec: AttentionSpec, batch: PagedBatch, num_tokens: int, form: PlanForm, tuning: Tuning, words: int
    ) -> None:
        arch = arch_of(batch.device)
        constants, config, layout = planned(spec, form, tuning, arch, batch.is_dense, words)
        programs = -(-(batch.num_sequences + 1) // OWN_SEQUENCES)
        items = min(max_items(spec, num_tokens, batch.num_sequences, config), layout.capacity)
        self._grid = (programs, max(1, min(-(-items // (programs * ITEMS_AT_ONCE)), MAX_WRITERS)), 1)
        key = (spec, form, tuning, batch.device, table_dtypes(batch), batch.is_dense)
        self._launch = PLAN.form(key, {"C": constants}, plan_options(arch))
        self._rest = (num_tokens, batch.num_sequences, layout.capacity, layout.states, layout.small_states)

    def __call__(self, batch: PagedBatch, plan: Tensor) -> None:
        self._launch(self._grid, (plan, *table_of(batch), *self._rest))


class PlannedRun:
    """Attention under a plan that the call brings."""

    def __init__(self, lists: list[ListRunner]) -> None:
        self._lists = lists

    def __call__(self, call: AttentionCall) -> None:
        assert call.plan is not None
        for attend in self._lists:
            attend(call, call.plan)


class WholeRun:
    """A plan of so many words, then attention under it."""

    def __init__(self, words: int, plan: PlanRun, lists: list[ListRunner]) -> None:
        self._words, self._plan, self._lists = words, plan, lists

    def __call__(self, call: AttentionCall) -> None:
        plan = torch.empty(self._words, dtype=torch.int32, device=call.q.device)
        self._plan(call.batch, plan)
        for attend in self._lists:
            attend(call, plan)
