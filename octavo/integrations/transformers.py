"""Octavo as an attention implementation of Hugging Face Transformers 5.17 and later.

    from octavo.integrations import transformers as octavo_transformers

    octavo_transformers.register()
    model.set_attn_implementation("octavo")  # then generate, generate_batch, or a forward pass

docs/integrations.md says what is read in place, what is gathered, and what is refused.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from octavo.errors import fail
from octavo.integrations.transformers_padded import attend_padded, mask_table
from octavo.integrations.transformers_paged import PAGED_NAME, attend_packed, keep_in_pages
from octavo.shapes import Tensor

NAME = "octavo"


def register() -> None:
    """Make `model.set_attn_implementation("octavo")` and `from_pretrained(..., attn_implementation="octavo")` work.

    May be called any number of times. It registers attention and mask functions under Transformers' own interface, and
    wraps functions of Transformers for Octavo's names alone: the one that picks an implementation for `generate_batch`,
    the one that loads FlashAttention's functions for flash-like names, and after 5.17 the one that gathers keys.

    Raises:
        ImportError: Transformers is not installed, or is older than 5.17.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, modeling_flash_attention_utils
        from transformers.generation.continuous_batching import ContinuousBatchingManager, PagedAttentionCache
    except ImportError as error:
        raise ImportError("octavo: expected transformers >= 5.17; fix: pip install 'octavo[transformers]'") from error
    for name in (NAME, PAGED_NAME):
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, mask_table)
        AttentionInterface.register(f"paged|{name}", attention)
    _wrap(modeling_flash_attention_utils, "_lazy_imports", _serve_flash_names)
    _wrap(ContinuousBatchingManager, "switch_to_cb_friendly_attn", _switch_to_paged)
    if not _has_prefixes():
        _wrap(PagedAttentionCache, "update", keep_in_pages)


@torch.compiler.disable
def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Transformers' attention function.

    query [batch, qo_heads, tokens, head_dim], key and value [batch, kv_heads, keys, dim] give (out [batch, tokens,
    qo_heads, value_dim], None): attention weights are never formed.

    Raises:
        ValueError, TypeError: the model asks for what Octavo does not compute, with what to use instead.
    """
    if options.get("output_attentions"):
        fail("output_attentions", "False", True, "attention weights are never formed; set_attn_implementation('eager')")
    if options.get("cu_seq_lens_q") is not None:
        return attend_packed(module, query, key, value, options), None
    return attend_padded(module, query, key, value, attention_mask, options), None


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace owner.name by wrapper(original, ...), once."""
    original = getattr(owner, name, None)
    if original is None:
        fail(
            "transformers", f"a version that has {owner.__name__}.{name}", "one without", "install transformers 5.24.0"
        )
    if getattr(original, "is_octavos", False):
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    wrapped.__dict__["is_octavos"] = True
    setattr(owner, name, wrapped)


def _serve_flash_names(original: Any, implementation: str | None, *args: Any, **kwargs: Any) -> Any:
    """Octavo's attention calls no FlashAttention function; Transformers only asks whether each is there."""
    if implementation is None or implementation.removeprefix("paged|") != PAGED_NAME:
        return original(implementation, *args, **kwargs)
    return (_not_called,) * 5


def _not_called(q: Tensor, k: Tensor, v: Tensor, block_table: Tensor | None = None, **options: Any) -> None:
    raise RuntimeError(
        f"{PAGED_NAME}: expected Octavo's attention function, got a call of FlashAttention's; fix: call register() "
        "before the model is made, and register nothing else under this name"
    )


def _switch_to_paged(original: Any, manager: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    """`generate_batch` of a model set to "octavo" runs under the paged name, and sets "octavo" again when it ends."""
    if model.config._attn_implementation != NAME:
        original(manager, model, *args, **kwargs)
        return
    pinned = getattr(model, "_compatible_flash_implementations", None) is not None
    if pinned and not _has_prefixes():
        fail(
            "generate_batch",
            "a model that takes any flash-like implementation",
            type(model).__name__,
            "Transformers pins those of this model; use generate, or set_attn_implementation('sdpa')",
        )
    if _has_prefixes():
        # A flash-like name turns on CUDA graphs wherever there is a GPU, also for a model on the CPU.
        model.set_attn_implementation(f"paged|{PAGED_NAME if model.device.type != 'cpu' and not pinned else NAME}")
    else:
        model.set_attn_implementation(PAGED_NAME)
    manager._original_attn_impl = NAME


def _has_prefixes() -> bool:
    """Up to 5.17 paged implementations have a prefix of their own, and update the cache themselves."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return "paged|sdpa" in ALL_ATTENTION_FUNCTIONS.valid_keys()
