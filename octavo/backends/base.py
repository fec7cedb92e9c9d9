"""What a backend is. Launchers only: the algorithm lives in kernels/, the decisions in planning/."""

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

from octavo.planning.form import PlanForm
from octavo.problem import Arch, AttentionSpec, PagedBatch
from octavo.shapes import Tensor
from octavo.variants import Extras as Extras


class AttentionCall(NamedTuple):
    """One validated call. `out` and `lse` are to be written completely, padding rows included."""

    spec: AttentionSpec
    batch: PagedBatch
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    out: Tensor
    lse: Tensor
    sm_scale: float
    """Multiplied with scale_tensor where that is given."""
    scale_tensor: Tensor | None = None
    plan: Tensor | None = None
    """Work items written by `Backend.plan`, or None: then the backend plans inside the call."""
    form: PlanForm | None = None
    """Form that the plan was made in; None where plan is None: then the backend chooses."""
    extras: Extras | None = None
    """None where the spec is plain. A batch with a mask has mask_indptr."""


Prepared = Callable[[AttentionCall], None]
"""Computes calls that look like the one it was prepared for: all but the tensors' addresses and contents, the value of
sm_scale, and the length of the page table is the same."""


@runtime_checkable
class Backend(Protocol):
    """A way to compute. Stateless: the instance in `BACKENDS` serves every call and thread."""

    name: str

    def reject(self, spec: AttentionSpec | None, arch: Arch) -> str | None:
        """Why this backend cannot serve `spec` on `arch`, or None when it can. spec None asks about the device only."""

    def plan_form(
        self, spec: AttentionSpec, num_tokens: int, batch: PagedBatch, arch: Arch, batch_invariant: bool = False
    ) -> PlanForm | None:
        """How a batch is planned, from shapes alone; None for a backend that makes no device plan."""

    def plan_words(self, spec: AttentionSpec, num_tokens: int, num_sequences: int, form: PlanForm) -> int:
        """int32 words that a plan for at most this many tokens and sequences takes."""

    def max_plan_words(
        self, spec: AttentionSpec, num_tokens: int, num_sequences: int, arch: Arch, batch_invariant: bool = False
    ) -> int:
        """The most that plan_words says of a batch of at most this size; 0 where there is no plan."""

    def plan(self, spec: AttentionSpec, batch: PagedBatch, num_tokens: int, form: PlanForm, plan: Tensor) -> None:
        """Write the work items into `plan`. No host synchronisation; capturable."""

    def prepare_plan(
        self, spec: AttentionSpec, batch: PagedBatch, num_tokens: int, form: PlanForm, words: int
    ) -> Callable[[PagedBatch, Tensor], None]:
        """`plan` for batches that look like this one, into plans of so many words."""

    def attend(self, call: AttentionCall) -> None:
        """Compute `call.out` and `call.lse`."""

    def prepare(self, call: AttentionCall) -> Prepared:
        """`attend` for calls that look like this one, whose sm_scale is not negative."""

    def append(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch) -> None:
        """Write new keys and values at the end of each sequence."""

    def merge(self, outs: list[Tensor], lses: list[Tensor], out: Tensor, lse: Tensor) -> None:
        """Combine attention states over disjoint keys, in the given order."""
