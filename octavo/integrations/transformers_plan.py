"""What the layers of one forward pass share: a spec from what a model asks for, and one plan per step."""

from collections.abc import Callable, Hashable
from typing import Any

from octavo.batch_attention import BatchAttention
from octavo.errors import fail
from octavo.kv_cache import PagedKV
from octavo.problem import AttentionSpec, PagedBatch
from octavo.shapes import Tensor

UNSUPPORTED = ("position_bias", "head_mask")


def spec_of(module: Any, query: Tensor, kv: PagedKV, options: dict[str, Any]) -> AttentionSpec:
    """The static problem of one layer.

    Args:
        module: the model's attention module.
        query: [batch, qo_heads, tokens, head_dim].
        kv: the keys and values as pages.
        options: keyword arguments that the model passed to its attention function.

    Raises:
        ValueError: the model asks for something that this Octavo does not compute.
    """
    for name in UNSUPPORTED:
        if options.get(name) is not None:
            fail(name, "None", "a value", f"Octavo has no {name}; model.set_attn_implementation('sdpa')")
    if options.get("dropout"):
        fail("dropout", "0 (there is no backward pass)", options["dropout"], "model.eval()")
    is_causal = options.get("is_causal")
    fields: dict[str, Any] = {
        "num_qo_heads": query.shape[1],
        "num_kv_heads": kv.num_kv_heads,
        "head_dim": query.shape[3],
        "value_dim": kv.v_cache.shape[3],
        "page_size": kv.page_size,
        "causal": bool(getattr(module, "is_causal", True) if is_causal is None else is_causal),
        "dtype": query.dtype,
    }
    return AttentionSpec(**fields, **_variants(options))


def _variants(options: dict[str, Any]) -> dict[str, Any]:
    """Transformers' options in the spec's words. Its window counts the row's own key, ours the keys before it."""
    found: dict[str, Any] = {}
    if options.get("sliding_window") is not None:
        found["window_left"] = int(options["sliding_window"]) - 1
    if options.get("softcap"):
        found["logits_soft_cap"] = float(options["softcap"])
    if options.get("s_aux") is not None:
        found["sinks"] = True
    return found


def values_of(options: dict[str, Any]) -> dict[str, Any]:
    """Per-layer values for `run`."""
    scaling, sinks = options.get("scaling"), options.get("s_aux")
    values: dict[str, Any] = {"sm_scale": scaling}
    if sinks is not None:
        values["sinks"] = sinks.float()
    return values


class _Step:
    """A plan that the layers of one forward pass share."""

    def __init__(self, attn: BatchAttention, batch: PagedBatch, layer: int) -> None:
        self.attn, self.batch, self.layer = attn, batch, layer


def planned(
    carrier: Tensor, layer: int, key: Hashable, spec: AttentionSpec, rows: int, make_batch: Callable[[], PagedBatch]
) -> tuple[BatchAttention, PagedBatch]:
    """The step's plan: made by its first layer, found by the others.

    Args:
        carrier: a tensor object that all layers of a step get and no other step does. The plan is kept on it, so its
            workspace lives as long as the step's tensors: in a CUDA graph, in the graph's own memory.
        layer: index of the calling layer. A forward pass calls layers in rising order, so a layer that does not follow
            the last one begins a new pass over the same tensors (a graph's capture after its warm-up), and plans anew.
        key: what the plan depends on beside the spec, such as the group of layers.
        rows: rows of q.
        make_batch: builds the page tables.
    """
    steps: dict[Hashable, _Step] = carrier.__dict__.setdefault("octavo_steps", {})
    step = steps.get((key, spec))
    if step is None or layer <= step.layer:
        batch = make_batch()
        attn = BatchAttention(spec, device=carrier.device)
        attn.plan(batch, num_tokens=rows)
        step = steps[(key, spec)] = _Step(attn, batch, layer)
    step.layer = layer
    return step.attn, step.batch
