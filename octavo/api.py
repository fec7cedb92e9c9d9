"""The public operator in one call: `run`, and `attend` over canonical values."""

from collections.abc import Hashable
from typing import Any

import torch

from octavo import ops
from octavo.backends import AttentionCall, arch_of, resolve
from octavo.batch_attention import BatchAttention
from octavo.calls import Ready, Remembered, Unchecked, look_of, look_of_table, needs_gradient
from octavo.kv_cache import PagedKV
from octavo.planning.form import PlanForm
from octavo.problem import AttentionSpec, PagedBatch
from octavo.shapes import Indptr, KeyCache, LogSumExp, Output, PageIds, PerSequence, Queries, Tensor, ValueCache
from octavo.validation import check_call, check_scale, check_values, reads_values, spec_of
from octavo.variants import Extras, check_base, check_extras, in_base, look_of_variants, spec_fields

READY: Remembered[Ready] = Remembered()

Options = tuple[bool, bool, str | None]
"""causal, batch_invariant, backend."""


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
    lse_base: int | str = 2,
    **variants: Any,
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
        lse_base: 2: lse is log2(sum(exp(s))); "e": the natural logarithm.
        variants: window_left, window_right, logits_soft_cap: as in AttentionSpec. sinks [qo_heads] float32: natural
            logits that join the softmax's denominator. alibi_slopes [qo_heads] float32. k_scale, v_scale: float or
            float32 tensor of shape [] or [kv_heads], multiplied with fp8 keys and values. See docs/numerics.md.

    Returns:
        (out [tokens, qo_heads, value_dim] in q's dtype, lse [tokens, qo_heads] float32). A row that sees no key has out
        0 and lse -inf, or its sink's. CPU tensors on a machine with a CUDA device are computed there and returned to
        the CPU.

    Raises:
        ValueError, TypeError: what was expected, what came, how to fix it; nothing is written.

    >>> import torch, octavo
    >>> q, kv = torch.zeros(2, 4, 16), torch.zeros(8, 1, 2, 16)
    >>> out, lse = octavo.run(q, kv, kv, torch.tensor([0, 2]), torch.tensor([0, 4]), torch.tensor([5, 0, 3, 1]))
    >>> lse[:, 0].exp2().round().tolist()  # the first query sees 3 keys, the second 4
    [3.0, 4.0]
    """
    fields = (qo_indptr, kv_indices, kv_indptr, last_page_len, None)
    options = (causal, batch_invariant, backend)
    if not validate and not variants and lse_base == 2:
        ready = _recall(_look(q, k_cache, v_cache, fields, options, isinstance(sm_scale, Tensor)))
        if ready is not None:
            return _attend_ready(ready, q, k_cache, v_cache, PagedBatch(*fields), sm_scale)
    return attend(
        q,
        PagedKV(k_cache, v_cache),
        PagedBatch.csr(qo_indptr, kv_indptr, kv_indices, last_page_len),
        sm_scale=sm_scale,
        causal=causal,
        batch_invariant=batch_invariant,
        validate=validate,
        backend=backend,
        lse_base=lse_base,
        **variants,
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
    lse_base: int | str = 2,
    **variants: Any,
) -> tuple[Output, LogSumExp]:
    """`run` over canonical values: any cache layout (`PagedKV`), any page table form (`PagedBatch`), custom masks."""
    check_base(lse_base)
    options = (causal, batch_invariant, backend)
    look = _look(q, kv.k_cache, kv.v_cache, batch.fields(), options, isinstance(sm_scale, Tensor))
    if look is not None and (variants or batch.custom_mask is not None):
        look = look, look_of_variants(variants, batch)
    ready = None if validate else _recall(look)
    if ready is not None:
        extras = None if ready.spec.is_plain else check_extras(ready.spec, variants, q.device)
        batch = batch.with_mask_indptr(ready.spec.page_size)
        out, lse = _attend_ready(ready, q, kv.k_cache, kv.v_cache, batch, sm_scale, extras)
        return out, in_base(lse, lse_base)
    plain = not variants and batch.custom_mask is None
    spec = spec_of(q, kv, causal) if plain else spec_of(q, kv, causal, **spec_fields(variants, batch))
    extras = check_extras(spec, variants, q.device)
    check_call(spec, q, kv, batch)
    if reads_values(q, validate):
        check_values(spec, batch, q.shape[0], kv.num_pages)
    batch = batch.with_mask_indptr(spec.page_size)
    if q.device.type == "cpu" and torch.cuda.is_available() and backend != "cpu":
        moved = PagedKV(kv.k_cache.cuda(), kv.v_cache.cuda())
        moved_extras = None if extras is None else extras.to("cuda")
        _, out, lse = _attend_checked(spec, q.cuda(), moved, batch.to("cuda"), (sm_scale, moved_extras), options)
        return out.cpu(), in_base(lse.cpu(), lse_base)
    ready, out, lse = _attend_checked(spec, q, kv, batch, (sm_scale, extras), options)
    if look is not None and ready is not None:
        READY.put(look, ready)
    return out, in_base(lse, lse_base)


def _look(
    q: Unchecked, k_cache: Unchecked, v_cache: Unchecked, fields: tuple[Unchecked, ...], options: Options, scaled: bool
) -> Hashable:
    """None where nothing is remembered: for an operator that PyTorch must see, on the CPU, whose values are checked at
    every call, and for what the checks will refuse."""
    if ops.is_traced(q):
        return None
    try:
        if not q.is_cuda or needs_gradient(q, k_cache, v_cache):
            return None
        return (
            *look_of(q),
            *look_of(k_cache),
            *look_of(v_cache),
            look_of_table(fields, k_cache.shape[1]),
            options,
            scaled,
        )
    except (AttributeError, IndexError):
        return None


def _recall(look: Hashable) -> Ready | None:
    return None if look is None else READY.get(look)


def _attend_ready(
    ready: Ready,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    sm_scale: float | Tensor | None,
    extras: Extras | None = None,
) -> tuple[Output, LogSumExp]:
    scale, scale_tensor = check_scale(sm_scale, ready.spec.default_scale, q.device)
    if extras is None and not ready.spec.is_plain:
        extras = Extras()
    out, lse = ready.empty_outputs(q)
    tensors = (q, k_cache, v_cache, out, lse)
    ready.run(AttentionCall(ready.spec, batch, *tensors, scale, scale_tensor, None, ready.form, extras))
    return out, lse


def _attend_checked(
    spec: AttentionSpec,
    q: Tensor,
    kv: PagedKV,
    batch: PagedBatch,
    values: tuple[float | Tensor | None, Extras | None],
    options: Options,
) -> tuple[Ready | None, Output, LogSumExp]:
    """values: sm_scale, extras."""
    (causal, batch_invariant, name), (sm_scale, extras) = options, values
    scale, scale_tensor = check_scale(sm_scale, spec.default_scale, q.device)
    form: PlanForm | None = None
    if batch_invariant:
        arch = arch_of(q.device)
        form = resolve(spec, arch, name).backend.plan_form(spec, q.shape[0], batch, arch, True)
    if ops.is_traced(q):
        inputs = (q, kv.k_cache, kv.v_cache, ops.pack_batch(batch), None, scale_tensor, scale)
        variants = ops.variant_options(spec, extras, q)
        return None, *ops.attention(*inputs, causal=causal, backend=name or "", form=form or (), **variants)
    backend = resolve(spec, arch_of(q.device), name).backend
    out, lse = ops.empty_outputs(q, kv.v_cache)
    tensors = (q, kv.k_cache, kv.v_cache, out, lse)
    call = AttentionCall(spec, batch, *tensors, scale, scale_tensor, None, form, extras)
    ready = Ready.of(call, backend)
    ready.run(call)
    return ready, out, lse


__all__ = ["BatchAttention", "attend", "run"]
