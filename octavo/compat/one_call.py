"""A call without a plan of its own, by spec: through `attend` where it can say what the spec says."""

from dataclasses import replace
from typing import Any

from octavo.api import attend
from octavo.batch_attention import BatchAttention
from octavo.kv_cache import PagedKV
from octavo.problem import AttentionSpec, PagedBatch
from octavo.shapes import LogSumExp, Output, Tensor


def attend_as(
    spec: AttentionSpec, q: Tensor, kv: PagedKV, batch: PagedBatch, **values: Any
) -> tuple[Output, LogSumExp]:
    """(out, lse) base 2; values: sm_scale and what else BatchAttention.run takes, None for absent."""
    given = {name: value for name, value in values.items() if value is not None}
    if spec == replace(_plain(spec), causal=spec.causal) and set(given) <= {"sm_scale"}:
        return attend(q, kv, batch, causal=spec.causal, **given)
    attention = BatchAttention(spec, device=q.device)
    attention.plan(batch, num_tokens=q.shape[0])
    return attention.run(q, kv, **given)


def _plain(spec: AttentionSpec) -> AttentionSpec:
    """The spec with shapes and dtype alone."""
    heads = spec.num_qo_heads, spec.num_kv_heads
    return AttentionSpec(*heads, spec.head_dim, spec.value_dim, spec.page_size, True, spec.dtype)
