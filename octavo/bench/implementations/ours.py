"""Octavo itself: the backend that it chooses, or a named one."""

from functools import partial

import torch

import octavo
from octavo.bench.implementations.base import Implementation, Prepared, Unsupported, variants_of
from octavo.bench.workloads import Inputs


def _make(inputs: Inputs, backend: str | None) -> Prepared:
    spec, q, kv, batch = inputs.spec, inputs.q, inputs.kv, inputs.batch
    try:
        attention = octavo.BatchAttention(spec, device=q.device, backend=backend)
    except ValueError as error:
        raise Unsupported(str(error)) from error
    out = q.new_empty((q.shape[0], spec.num_qo_heads, spec.v_dim))
    lse = torch.empty(out.shape[:2], dtype=torch.float32, device=q.device)

    def call() -> object:
        return octavo.attend(q, kv, batch, causal=spec.causal, backend=backend)

    return Prepared(
        run=lambda: attention.run(q, kv, out=out, lse=lse),
        plan=lambda: attention.plan(batch, q.shape[0]),
        plan_on_device=True,
        call=None if variants_of(spec) else call,  # attend's own arguments differ from variant to variant
        buffers=(out, lse),
        backend=attention.choice.backend.name,
    )


def load(name: str) -> Implementation:
    """ "octavo" or "octavo-BACKEND"."""
    backend = name.removeprefix("octavo").removeprefix("-") or None
    return Implementation(name, partial(_make, backend=backend), {"octavo": octavo.__version__})
