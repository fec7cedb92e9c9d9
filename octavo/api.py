"""The public operator: `run` and `attend` for one call, `BatchAttention` for a plan that many layers share."""

from typing import Any

import torch

from octavo import ops
from octavo.backends import Choice, arch_of, resolve
from octavo.errors import fail
from octavo.kv_cache import PagedKV
from octavo.planning.form import PlanForm
from octavo.problem import AttentionSpec, PagedBatch
from octavo.shapes import Indptr, KeyCache, LogSumExp, Output, PageIds, PerSequence, Queries, Tensor, ValueCache
from octavo.validation import (
    check_batch,
    check_call,
    check_device,
    check_outputs,
    check_scale,
    check_values,
    spec_of,
)


def run(
    q: Queries,
    k_cache: KeyCache,
    v_cache: ValueCache,
    qo_indptr: Indptr,
    kv_indptr: Indptr,
    kv_indices: PageIds,
    sm_scale: float | Tensor | None = None,
    *,
    last_page_len: PerSequence | None = None,
    causal: bool = True,
    batch_invariant: bool = False,
    validate: bool = False,
    backend: str | None = None,
) -> tuple[Output, LogSumExp]:
    """Paged grouped-query attention over a CSR page table.

    Args:
        q: [tokens, qo_heads, head_dim], bfloat16, float16 or float32; any strides with a contiguous last dimension.
        k_cache: [pages, page_size, kv_heads, head_dim], dtype of q, any strides with a contiguous last dimension.
        v_cache: [pages, page_size, kv_heads, value_dim], strides of its own.
        qo_indptr: [sequences + 1] int32 or int64, token offsets of each sequence's queries.
        kv_indptr: [sequences + 1], page offsets into kv_indices.
        kv_indices: [>= kv_indptr[-1]], page ids.
        sm_scale: float or 0-d tensor multiplied with q k^T; None means 1 / sqrt(head_dim).
        last_page_len: [sequences], keys in each sequence's last page; required when page_size > 1.
        causal: query i of a sequence sees keys j <= i + kv_len - q_len (bottom-right aligned).
        batch_invariant: a sequence's result does not depend, to the bit, on the rest of the batch. Long keys of few
            queries are then cut into at most 16 parts, by their number alone.
        validate: also check index values on a GPU, which synchronises; on the CPU they always are.
        backend: name of the backend to use; None chooses (see `octavo info`).

    Returns:
        (out [tokens, qo_heads, value_dim] in q's dtype, lse [tokens, qo_heads] float32, base 2). A row that sees no key
        has out 0 and lse -inf. CPU tensors on a machine with a CUDA device are computed there and returned to the CPU.

    Raises:
        ValueError, TypeError: what was expected, what came, how to fix it; nothing is written.

    >>> import torch, octavo
    >>> q, kv = torch.zeros(2, 4, 16), torch.zeros(8, 1, 2, 16)
    >>> out, lse = octavo.run(q, kv, kv, torch.tensor([0, 2]), torch.tensor([0, 4]), torch.tensor([5, 0, 3, 1]))
    >>> lse[:, 0].exp2().round().tolist()  # the first query sees 3 keys, the second 4
    [3.0, 4.0]
    """
    batch = PagedBatch.csr(qo_indptr, kv_indptr, kv_indices, last_page_len)
    return attend(
        q,
        PagedKV(k_cache, v_cache),
        batch,
        sm_scale=sm_scale,
        causal=causal,
        batch_invariant=batch_invariant,
        validate=validate,
        backend=backend,
    )


def attend(
    q: Queries,
    kv: PagedKV,
    batch: PagedBatch,
    *,
    sm_scale: float | Tensor | None = None,
    causal: bool = True,
    batch_invariant: bool = False,
    validate: bool = False,
    backend: str | None = None,
) -> tuple[Output, LogSumExp]:
    """`run` over canonical values: any cache layout (`PagedKV`), any page table form (`PagedBatch`)."""
    spec = spec_of(q, kv, causal)
    check_call(spec, q, kv, batch)
    if q.device.type == "cpu" and torch.cuda.is_available() and backend != "cpu":
        options = {"causal": causal, "batch_invariant": batch_invariant, "backend": backend}
        return _attend_on_gpu(q, kv, batch, sm_scale, options)
    scale, scale_tensor = check_scale(sm_scale, spec.default_scale, q.device)
    if _reads_values(q, validate):
        check_values(spec, batch, q.shape[0], kv.num_pages)
    inputs = (q, kv.k_cache, kv.v_cache, ops.pack_batch(batch), None, scale_tensor, scale)
    form: tuple[int, ...] = ()
    if batch_invariant:
        arch = arch_of(q.device)
        form = resolve(spec, arch, backend).backend.plan_form(spec, q.shape[0], batch, arch, True) or ()
    operator = ops.attention if ops.is_traced(q) else ops.attention_now
    return operator(*inputs, causal=causal, backend=backend or "", form=form)


def _attend_on_gpu(
    q: Queries, kv: PagedKV, batch: PagedBatch, sm_scale: float | Tensor | None, options: dict[str, Any]
) -> tuple[Output, LogSumExp]:
    if _reads_values(q, False):
        check_values(spec_of(q, kv, options["causal"]), batch, q.shape[0], kv.num_pages)
    moved = PagedKV(kv.k_cache.cuda(), kv.v_cache.cuda())
    out, lse = attend(q.cuda(), moved, batch.to("cuda"), sm_scale=sm_scale, **options)
    return out.cpu(), lse.cpu()


def _reads_values(x: Tensor, validate: bool) -> bool:
    return (validate or x.device.type == "cpu") and not torch.compiler.is_compiling()


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
        self._num_tokens = 0
        self._form: PlanForm | None = None
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
        check_batch(self.spec, batch)
        check_device("qo_indptr", batch.qo_indptr, self.device)
        if _reads_values(batch.qo_indptr, validate):
            check_values(self.spec, batch, num_tokens, None)
        tokens = self._token_bound(batch, num_tokens)
        if self.max_sequences is not None and batch.num_sequences > self.max_sequences:
            fail("batch", f"at most max_sequences={self.max_sequences}", batch.num_sequences, "raise max_sequences")
        backend = self.choice.backend
        form = backend.plan_form(self.spec, tokens, batch, arch_of(self.device), self.batch_invariant)
        if form is not None:
            if backend.plan_words(self.spec, tokens, batch.num_sequences, form) > self._workspace.numel():
                self._reserve(tokens, batch.num_sequences)
            self._plan_on_device(batch, tokens, form)
        self._batch, self._num_tokens, self._form = batch, tokens, form

    def _plan_on_device(self, batch: PagedBatch, tokens: int, form: PlanForm) -> None:
        s = self.spec
        operator = ops.plan if ops.is_traced(batch.qo_indptr) else ops.plan_now
        operator(
            ops.pack_batch(batch),
            self._workspace,
            tokens,
            shape=[s.num_qo_heads, s.num_kv_heads, s.head_dim, s.v_dim, s.page_size],
            dtype=s.dtype,
            causal=s.causal,
            backend=self.choice.backend.name,
            form=form,
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
    ) -> tuple[Output, LogSumExp]:
        """Attention of one layer under the current plan.

        Args:
            q: [tokens, qo_heads, head_dim], at most as many rows as planned.
            kv: this layer's cache.
            sm_scale: float or 0-d tensor; None means 1 / sqrt(head_dim). A tensor on the GPU is read there.
            out, lse: buffers to write, both or neither.
        """
        batch = self._batch
        if batch is None:
            raise RuntimeError("BatchAttention.run: expected a plan, got none; fix: call plan(batch) first")
        check_call(self.spec, q, kv, batch)
        check_outputs(self.spec, q, out, lse)
        if q.shape[0] > self._num_tokens:
            fail("q", f"at most the {self._num_tokens} rows planned", q.shape[0], "plan with num_tokens=len(q)")
        scale, scale_tensor = check_scale(sm_scale, self.spec.default_scale, q.device)
        if _reads_values(q, False):
            check_values(self.spec, batch, q.shape[0], kv.num_pages)
        form = self._form or ()
        plan = self._workspace if form else None
        inputs = (q, kv.k_cache, kv.v_cache, ops.pack_batch(batch), plan, scale_tensor, scale)
        causal, backend = self.spec.causal, self.choice.backend.name
        traced = ops.is_traced(q)
        if out is None or lse is None:
            operator = ops.attention if traced else ops.attention_now
            return operator(*inputs, causal=causal, backend=backend, form=form)
        write = ops.attention_out if traced else ops.attention_out_now
        write(*inputs, causal=causal, backend=backend, form=form, out=out, lse=lse)
        return out, lse

    def explain(self) -> str:
        """The chosen backend, its tiles and bounds, and why each other backend was not taken."""
        lines = [f"spec      {self.spec}", f"backend   {self.choice.backend.name} on {self.device}"]
        if self._batch is not None:
            tiles = self._form.describe() if self._form else "per sequence"
            lines += [f"plan      {self._batch}", f"tiles     {tiles}, at most {self._num_tokens} tokens"]
        lines.append(f"workspace {self._workspace.numel() * 4} bytes")
        lines += [f"not {name}: {reason}" for name, reason in self.choice.rejected]
        return "\n".join(lines)
