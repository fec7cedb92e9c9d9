"""BatchAttention: a plan, made once per step, that many layers share."""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

from octavo import ops
from octavo.backends import AttentionCall, Choice, arch_of, resolve
from octavo.calls import Ready, Remembered, look_of, look_of_table, needs_gradient
from octavo.errors import fail
from octavo.kv_cache import PagedKV
from octavo.planning.form import PlanForm
from octavo.planning.readback import explain_plan
from octavo.problem import AttentionSpec, PagedBatch
from octavo.shapes import LogSumExp, Output, Queries, Tensor
from octavo.validation import (
    check_batch,
    check_call,
    check_device,
    check_outputs,
    check_scale,
    check_values,
    reads_values,
)
from octavo.variants import Extras, check_base, check_extras, in_base, look_of_variants


class _Planner(NamedTuple):
    """A checked kind of batch."""

    number: int
    """Of its own among those of a BatchAttention."""
    num_tokens: int
    """Rows that q will have at most."""
    form: PlanForm | None
    plan: Callable[[PagedBatch, Tensor], None] | None


class BatchAttention:
    """A plan, made once per step, that every layer's `run` uses; owns the workspace that the plan lives in.

    Args:
        spec: the static problem.
        device: where the batches live; None is the current CUDA device, or the CPU where there is none.
        max_tokens: upper bound on query tokens (rows of q). With max_sequences it sizes the workspace once, as CUDA
            graphs need; without, `plan` needs num_tokens on a GPU and the workspace grows.
        max_sequences: upper bound on sequences.
        batch_invariant: as in `run`.
        backend: name of the backend to use; None chooses.

    >>> import torch
    >>> spec = AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
    >>> attn = BatchAttention(spec, device="cpu")
    >>> attn.plan(PagedBatch.csr(torch.tensor([0, 1]), torch.tensor([0, 3]), torch.tensor([2, 0, 1])))
    >>> cache = torch.zeros(3, 1, 2, 16)
    >>> attn.run(torch.zeros(1, 4, 16), PagedKV(cache, cache))[0].shape
    torch.Size([1, 4, 16])
    """

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        device: torch.device | str | None = None,
        max_tokens: int | None = None,
        max_sequences: int | None = None,
        batch_invariant: bool = False,
        backend: str | None = None,
    ) -> None:
        self.spec = spec
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.choice: Choice = resolve(spec, arch_of(self.device), backend)
        self.max_tokens, self.max_sequences = max_tokens, max_sequences
        self.batch_invariant = batch_invariant
        self._workspace = torch.empty(0, dtype=torch.int32, device=self.device)
        self._batch: PagedBatch | None = None
        self._planner: _Planner | None = None
        self._planners: Remembered[_Planner] = Remembered()
        self._ready: Remembered[Ready] = Remembered()
        self._planners_made = 0
        if max_tokens is not None and max_sequences is not None:
            self._reserve(max_tokens, max_sequences)

    def plan(self, batch: PagedBatch, num_tokens: int | None = None, *, validate: bool = False) -> None:
        """Make the work items of one step, on the device, without a host synchronisation.

        Args:
            batch: the step's page tables; kept by reference, so a captured graph sees later contents.
            num_tokens: rows that q will have at most; None means max_tokens (on the CPU, what qo_indptr says).
            validate: also check index values on a GPU, which synchronises.

        A plan that raises leaves the previous one usable.
        """
        if batch.custom_mask is not None:
            batch = batch.with_mask_indptr(self.spec.page_size)
        traced = ops.is_traced(batch.qo_indptr)
        look: Hashable = None
        if batch.qo_indptr.is_cuda and not validate and not traced:
            look = look_of_table(batch.fields(), self.spec.page_size), num_tokens, self._workspace.numel()
        planner = None if look is None else self._planners.get(look)
        if planner is None:
            tokens, form = self._check_plan(batch, num_tokens, validate)
            planner = _Planner(0, tokens, form, None)
            if form is not None and traced:
                self._plan_traced(tokens, form, batch)
            elif form is not None:
                planner = self._prepare_plan(batch, tokens, form)
            if look is not None:
                self._planners.put(look, planner)
        if planner.plan is not None:
            planner.plan(batch, self._workspace)
        self._batch, self._planner = batch, planner

    def _check_plan(self, batch: PagedBatch, num_tokens: int | None, validate: bool) -> tuple[int, PlanForm | None]:
        """(bound on rows, form), with room for the plan."""
        check_batch(self.spec, batch)
        check_device("qo_indptr", batch.qo_indptr, self.device)
        if reads_values(batch.qo_indptr, validate):
            check_values(self.spec, batch, num_tokens, None)
        tokens = self._token_bound(batch, num_tokens)
        if self.max_sequences is not None and batch.num_sequences > self.max_sequences:
            fail("batch", f"at most max_sequences={self.max_sequences}", batch.num_sequences, "raise max_sequences")
        backend = self.choice.backend
        form = backend.plan_form(self.spec, tokens, batch, arch_of(self.device), self.batch_invariant)
        words = 0 if form is None else backend.plan_words(self.spec, tokens, batch.num_sequences, form)
        if words > self._workspace.numel():
            self._reserve(tokens, batch.num_sequences)
        return tokens, form

    def _prepare_plan(self, batch: PagedBatch, tokens: int, form: PlanForm) -> _Planner:
        self._planners_made += 1
        plan = self.choice.backend.prepare_plan(self.spec, batch, tokens, form, self._workspace.numel())
        return _Planner(self._planners_made, tokens, form, plan)

    def _plan_traced(self, tokens: int, form: PlanForm, batch: PagedBatch) -> None:
        s = self.spec
        ops.plan(
            ops.pack_batch(batch),
            self._workspace,
            tokens,
            shape=[s.num_qo_heads, s.num_kv_heads, s.head_dim, s.v_dim, s.page_size],
            dtype=s.dtype,
            causal=s.causal,
            backend=self.choice.backend.name,
            form=form,
            window=[s.window_left, s.window_right],
            kv_dtype=s.kv_dtype,
        )

    def _token_bound(self, batch: PagedBatch, num_tokens: int | None) -> int:
        if num_tokens is None:
            num_tokens = self.max_tokens
        if num_tokens is None and self.device.type == "cpu":
            num_tokens = int(batch.qo_indptr[-1])
        if num_tokens is None:
            fail("num_tokens", "the rows of q, or max_tokens at creation", None, "attn.plan(batch, num_tokens=len(q))")
        if self.max_tokens is not None and num_tokens > self.max_tokens:
            fail("num_tokens", f"at most max_tokens={self.max_tokens}", num_tokens, "raise max_tokens at creation")
        return num_tokens

    def _reserve(self, tokens: int, sequences: int) -> None:
        tokens, sequences = max(tokens, self.max_tokens or 0), max(sequences, self.max_sequences or 0)
        arch = arch_of(self.device)
        words = self.choice.backend.max_plan_words(self.spec, tokens, sequences, arch, self.batch_invariant)
        self._workspace = torch.empty(words, dtype=torch.int32, device=self.device)

    def run(
        self,
        q: Queries,
        kv: PagedKV,
        *,
        sm_scale: float | Tensor | None = None,
        out: Output | None = None,
        lse: LogSumExp | None = None,
        lse_base: int | str = 2,
        **values: Any,
    ) -> tuple[Output, LogSumExp]:
        """Attention of one layer under the current plan.

        Args:
            q: [tokens, qo_heads, head_dim], at most as many rows as planned.
            kv: this layer's cache.
            sm_scale: float or 0-d tensor; None means 1 / sqrt(head_dim). A tensor on the GPU is read there.
            out, lse: buffers to write, both or neither.
            lse_base: 2: lse is log2(sum(exp(s))); "e": the natural logarithm.
            values: sinks, alibi_slopes, k_scale and v_scale, as in `octavo.run`: those that the spec says.
        """
        batch, planner = self._batch, self._planner
        if batch is None or planner is None:
            raise RuntimeError("BatchAttention.run: expected a plan, got none; fix: call plan(batch) first")
        check_base(lse_base)
        extras = check_extras(self.spec, values, q.device) if values or not self.spec.is_plain else None
        look = self._look(planner, q, kv, out, lse, isinstance(sm_scale, Tensor))
        if look is not None and extras is not None:
            look = look, look_of_variants(values, batch)
        ready = None if look is None else self._ready.get(look)
        if ready is None:
            check_call(self.spec, q, kv, batch)
            check_outputs(self.spec, q, out, lse)
            if q.shape[0] > planner.num_tokens:
                fail("q", f"at most the {planner.num_tokens} rows planned", q.shape[0], "plan with num_tokens=len(q)")
            if reads_values(q, False):
                check_values(self.spec, batch, q.shape[0], kv.num_pages)
        scale, scale_tensor = check_scale(sm_scale, self.spec.default_scale, q.device)
        plan = self._workspace if planner.form else None
        if ops.is_traced(q):
            out, lse = self._run_traced(q, kv, (plan, scale_tensor, scale), extras, out, lse)
            return out, in_base(lse, lse_base)
        if out is None or lse is None:
            out, lse = ops.empty_outputs(q, kv.v_cache) if ready is None else ready.empty_outputs(q)
        tensors = (q, kv.k_cache, kv.v_cache, out, lse)
        call = AttentionCall(self.spec, batch, *tensors, scale, scale_tensor, plan, planner.form, extras)
        if ready is None:
            ready = Ready.of(call, self.choice.backend)
            if look is not None:
                self._ready.put(look, ready)
        ready.run(call)
        return out, in_base(lse, lse_base)

    def _look(
        self, planner: _Planner, q: Tensor, kv: PagedKV, out: Tensor | None, lse: Tensor | None, scaled: bool
    ) -> Hashable:
        """None where nothing is remembered: see api.py."""
        if planner.plan is None or ops.is_traced(q) or not q.is_cuda or needs_gradient(q, kv.k_cache, kv.v_cache):
            return None
        look = (*look_of(q), kv.look, planner.number, self._workspace.numel(), scaled)
        if out is None or lse is None:
            return look if out is lse else None
        return (*look, *look_of(out), *look_of(lse))

    def _run_traced(
        self,
        q: Tensor,
        kv: PagedKV,
        values: tuple[Tensor | None, Tensor | None, float],
        extras: Extras | None,
        out: Tensor | None,
        lse: Tensor | None,
    ) -> tuple[Output, LogSumExp]:
        assert self._batch is not None and self._planner is not None
        inputs = (q, kv.k_cache, kv.v_cache, ops.pack_batch(self._batch), *values)
        options = {"causal": self.spec.causal, "backend": self.choice.backend.name, "form": self._planner.form or ()}
        options |= ops.variant_options(self.spec, extras, q)
        if out is None or lse is None:
            return ops.attention(*inputs, **options)
        ops.attention_out(*inputs, **options, out=out, lse=lse)
        return out, lse

    def explain(self) -> str:
        """The chosen backend, why each other was not taken, and the schedule of the plan that is in the workspace: its
        items, cuts and balance, rows that see no key, and on an H200 the predicted time beside the roofline.

        On a GPU this reads the plan back: it waits for the device, and raises while a CUDA graph is being captured.
        After a graph's replay, the plan is that of the replay.
        """
        lines = [f"spec      {self.spec}", f"backend   {self.choice.backend.name} on {self.device}"]
        if self._batch is not None:
            assert self._planner is not None
            tiles = self._planner.form.describe() if self._planner.form else "per sequence"
            lines += [f"plan      {self._batch}", f"tiles     {tiles}, at most {self._planner.num_tokens} tokens"]
            if self._planner.form:
                lines += explain_plan(self.spec, self._workspace, self._planner.form, arch_of(self.device))
        lines.append(f"workspace {self._workspace.numel() * 4} bytes")
        lines += [f"not {name}: {reason}" for name, reason in self.choice.rejected]
        return "\n".join(lines)
