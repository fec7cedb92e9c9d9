"""Other attention libraries, through modules use_flashinfer, use_fa3_dense and use_fa4 found on sys.path.

Each module has a `make(...)` whose arguments are used here by name; docs/benchmarks.md describes them.
"""

import importlib
import math
import sys
from collections.abc import Callable
from functools import partial
from importlib import metadata
from types import ModuleType
from typing import Any

import torch

from octavo.bench.implementations.base import Implementation, Prepared, Result, require, require_plain
from octavo.bench.workloads import Inputs
from octavo.reference import gather_pages, page_ids, sequence_lengths

LOG2_E = math.log2(math.e)


def _require_served(inputs: Inputs) -> None:
    spec = inputs.spec
    require_plain(spec)
    require(spec.dtype == torch.bfloat16, "this build serves bfloat16 only")
    require(spec.head_dim == spec.v_dim == 128, "this build serves head_dim 128 only")


def _paged(inputs: Inputs) -> dict[str, Any]:
    """The arguments that every paged wrapper takes."""
    spec, batch = inputs.spec, inputs.batch
    assert batch.kv_indptr is not None
    return {
        "q": inputs.q,
        "k_cache": inputs.kv.k_cache,
        "v_cache": inputs.kv.v_cache,
        "kv_indptr": batch.kv_indptr,
        "kv_indices": batch.page_table,
        "kv_last_page_len": batch.last_page_len,
        "page_size": spec.page_size,
        "num_qo_heads": spec.num_qo_heads,
        "num_kv_heads": spec.num_kv_heads,
        "sm_scale": spec.default_scale,
    }


def _flashinfer(module: ModuleType, inputs: Inputs, backend: str) -> Prepared:
    _require_served(inputs)
    plan, run = module.make(
        **_paged(inputs), qo_indptr=inputs.batch.qo_indptr, causal=inputs.spec.causal, backend=backend
    )
    return Prepared(run=run, plan=plan)


def _flashinfer_decode(module: ModuleType, inputs: Inputs) -> Prepared:
    _require_served(inputs)
    q_lens, kv_lens = sequence_lengths(inputs.batch, inputs.spec.page_size)
    require(set(q_lens) == {1}, "serves decode only: one query per sequence")
    require(min(kv_lens) > 0, "serves sequences with keys only")
    plan, run = module.make_decode(**_paged(inputs))
    return Prepared(run=run, plan=plan)


def _fa4(module: ModuleType, inputs: Inputs) -> Prepared:
    _require_served(inputs)
    run = module.make(**_paged(inputs), qo_indptr=inputs.batch.qo_indptr, causal=inputs.spec.causal)
    return Prepared(run=run, canonical=_natural_heads_first)


def _fa3_dense(module: ModuleType, inputs: Inputs) -> Prepared:
    _require_served(inputs)
    spec, batch = inputs.spec, inputs.batch
    _, kv_lens = sequence_lengths(batch, spec.page_size)
    require(sum(kv_lens) > 0, "serves batches with keys only")
    ids = [page_ids(batch, i, -(-n // spec.page_size)) for i, n in enumerate(kv_lens)]
    k, v = (
        torch.cat([gather_pages(cache, i, n) for i, n in zip(ids, kv_lens, strict=True)])
        for cache in (inputs.kv.k_cache, inputs.kv.v_cache)
    )
    bounds = torch.tensor([0, *kv_lens]).cumsum(0)
    # Its split heuristic is for decode; prefill runs best unsplit.
    splits = 0 if inputs.q.shape[0] == batch.num_sequences else 1
    run = module.make(inputs.q, k, v, batch.qo_indptr, bounds, spec.default_scale, spec.causal, splits)
    return Prepared(run=run, canonical=_natural_heads_first)


def _natural_heads_first(result: Any) -> Result:
    """From FlashAttention's form: lse [heads, tokens] in natural logarithm, +inf where a row sees no key."""
    out, lse = result
    base2 = lse.T.float() * LOG2_E
    return out, torch.where(base2 == math.inf, -math.inf, base2)


_PEERS: dict[str, tuple[str, str, Callable[[ModuleType, Inputs], Prepared]]] = {
    "flashinfer-fa2": ("use_flashinfer", "flashinfer-python", partial(_flashinfer, backend="fa2")),
    "flashinfer-fa3": ("use_flashinfer", "flashinfer-python", partial(_flashinfer, backend="fa3")),
    "flashinfer-decode": ("use_flashinfer", "flashinfer-python", _flashinfer_decode),
    "fa4": ("use_fa4", "flash-attn-4", _fa4),
    "fa3-dense": ("use_fa3_dense", "fa3-fwd", _fa3_dense),
}
NAMES = tuple(_PEERS)


def load(name: str) -> Implementation:
    """Raises ImportError, or whatever importing the library raises."""
    module_name, distribution, make = _PEERS[name]
    module = importlib.import_module(module_name)
    return Implementation(name, partial(make, module), {distribution: _version(distribution)})


def _version(distribution: str) -> str:
    """From the package's metadata or, where a folder of peers was stripped of it, from the package."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        package = sys.modules.get(distribution.removesuffix("-python"))
        return str(getattr(package, "__version__", "unknown"))
