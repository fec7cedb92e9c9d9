"""PyTorch's variable-length attention over block tables, and FlexAttention over K/V gathered before the clock."""

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from octavo.bench.implementations.base import Implementation, Prepared, Unsupported, require_plain
from octavo.bench.implementations.gathered import Sequences, gather, require_visible, scatter
from octavo.bench.workloads import Inputs
from octavo.reference import page_ids, sequence_lengths
from octavo.shapes import Tensor


def _block_table(inputs: Inputs, kv_lens: list[int]) -> Tensor:
    """[sequences, most pages], int32; places past a sequence's end are page 0."""
    size = inputs.spec.page_size
    counts = [-(-n // size) for n in kv_lens]
    table = torch.zeros(len(counts), max(1, *counts), dtype=torch.int32, device=inputs.q.device)
    for sequence, count in enumerate(counts):
        table[sequence, :count] = page_ids(inputs.batch, sequence, count).int()
    return table


def _varlen(module: Any, inputs: Inputs) -> Prepared:
    spec, batch = inputs.spec, inputs.batch
    require_plain(spec)
    q_lens, kv_lens = sequence_lengths(batch, spec.page_size)
    cu_q = batch.qo_indptr
    used = torch.tensor(kv_lens, dtype=torch.int32, device=inputs.q.device)
    call = partial(
        module.varlen_attn,
        inputs.q,
        inputs.kv.k_cache,
        inputs.kv.v_cache,
        cu_q,
        None,
        max(q_lens),
        max(kv_lens),
        scale=spec.default_scale,
        window_size=(-1, 0) if spec.causal else (-1, -1),
        enable_gqa=spec.group_size > 1,
        seqused_k=used,
        block_table=_block_table(inputs, kv_lens),
    )
    _refusals_are_unsupported(call)
    return Prepared(run=call, canonical=lambda out: (out, None))


def _refusals_are_unsupported(call: Callable[[], object]) -> None:
    """Page sizes and dtypes that it serves depend on the device and the build: ask it."""
    try:
        call()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        if isinstance(error, getattr(torch, "AcceleratorError", ())):
            raise
        raise Unsupported(str(error).splitlines()[0][:200]) from error


def _flex(module: Any, inputs: Inputs) -> Prepared:
    """One call per group of sequences of the same lengths; block masks are made before the clock."""
    spec = inputs.spec
    require_plain(spec)
    require_visible(inputs)
    groups = gather(inputs)
    device = str(inputs.q.device)
    masks = [_flex_mask(module, group, device) if spec.causal else None for group in groups]
    on_gpu = inputs.q.device.type == "cuda"
    attend = torch.compile(module.flex_attention, dynamic=False) if on_gpu else module.flex_attention
    more = {"scale": spec.default_scale, "enable_gqa": spec.group_size > 1}

    def run() -> list[Tensor]:
        return [attend(g.q, g.k, g.v, block_mask=mask, **more) for g, mask in zip(groups, masks, strict=True)]

    return Prepared(run=run, canonical=partial(scatter, inputs, groups))


def _flex_mask(module: Any, group: Sequences, device: str) -> Any:
    q_len, kv_len = group.q.shape[2], group.k.shape[2]

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query + (kv_len - q_len) >= key

    return module.create_block_mask(sees, None, None, q_len, kv_len, device=device)


_MODULES: dict[str, tuple[str, Callable[[Any, Inputs], Prepared]]] = {
    "torch-varlen": ("torch.nn.attention.varlen", _varlen),
    "flex": ("torch.nn.attention.flex_attention", _flex),
}
NAMES = tuple(_MODULES)


def load(name: str) -> Implementation:
    """Raises ImportError where this PyTorch has no such attention, or none over block tables."""
    module_name, make = _MODULES[name]
    module = importlib.import_module(module_name)
    if name == "torch-varlen" and "block_table" not in inspect.signature(module.varlen_attn).parameters:
        raise ImportError(f"varlen_attn of PyTorch {torch.__version__} takes no block_table")
    return Implementation(name, partial(make, module), {"torch": torch.__version__})
