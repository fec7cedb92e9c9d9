"""PagedKV: the one place where layouts exist. Everything behind it sees [pages, page_size, kv_heads, dim] views."""

import functools
from collections.abc import Hashable
from dataclasses import dataclass

from octavo.errors import fail
from octavo.shapes import KeyCache, Tensor, ValueCache

LAYOUTS = ("NHD", "HND")


def _canonical(x: Tensor, layout: str) -> Tensor:
    """A view of our own, whose shape and strides nobody changes; but a gradient must be seen to be refused."""
    if layout == "HND":
        return x.transpose(1, 2)
    return x if x.requires_grad else x.detach()


class _Numbers:
    """A number for everything that was asked for."""

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}

    def of(self, x: Hashable) -> int:
        return self._known.setdefault(x, len(self._known))


_LOOKS = _Numbers()


def _check(x: object, name: str, rank: int, layout: str) -> None:
    if layout not in LAYOUTS:
        fail("layout", f"one of {LAYOUTS}", repr(layout), "NHD is [pages, page_size, heads, dim]")
    if not isinstance(x, Tensor):
        fail(name, "a tensor", type(x).__name__, "pass the cache tensor itself", TypeError)
    if x.dim() != rank:
        fail(name, f"{rank} dimensions", f"shape {list(x.shape)}", "see PagedKV")


@dataclass(frozen=True, eq=False)
class PagedKV:
    """A paged K/V cache as two strided views; no constructor copies anything.

    Args:
        k_cache: [pages, page_size, kv_heads, head_dim] for "NHD", [pages, kv_heads, page_size, head_dim] for "HND".
        v_cache: the same with value_dim. Strides may differ from k_cache's; the last dimension must be contiguous.
        layout: "NHD" or "HND". After construction `k_cache` and `v_cache` are NHD views.

    >>> import torch
    >>> PagedKV(torch.zeros(10, 4, 16, 64), torch.zeros(10, 4, 16, 64), layout="HND").page_size
    16
    """

    k_cache: KeyCache
    v_cache: ValueCache
    layout: str = "NHD"

    def __post_init__(self) -> None:
        for name in ("k_cache", "v_cache"):
            x = getattr(self, name)
            _check(x, name, 4, self.layout)
            object.__setattr__(self, name, _canonical(x, self.layout))
        object.__setattr__(self, "layout", "NHD")

    @classmethod
    def combined(cls, cache: Tensor, layout: str = "NHD") -> "PagedKV":
        """FlashInfer's single tensor: [pages, 2, page_size, kv_heads, dim] (NHD), K at [:, 0], V at [:, 1]."""
        _check(cache, "cache", 5, layout)
        if cache.shape[1] != 2:
            fail("cache", "shape [pages, 2, ...]", list(cache.shape), "K and V are dimension 1")
        return cls(cache[:, 0], cache[:, 1], layout)

    @classmethod
    def packed(cls, cache: Tensor, head_dim: int, layout: str = "HND") -> "PagedKV":
        """vLLM's single tensor with K and V side by side in the last dimension: [..., head_dim + value_dim]."""
        _check(cache, "cache", 4, layout)
        if not 0 < head_dim < cache.shape[-1]:
            limits = f"1 to {cache.shape[-1] - 1}"
            fail("head_dim", limits, head_dim, "the last dimension of cache holds head_dim + value_dim elements")
        return cls(cache[..., :head_dim], cache[..., head_dim:], layout)

    @functools.cached_property
    def look(self) -> int:
        """The same number for all caches of the same shapes, dtypes, devices, strides and alignment to 16 bytes."""
        parts = ((x.shape, x.dtype, x.device, x.stride(), x.data_ptr() & 15) for x in (self.k_cache, self.v_cache))
        return _LOOKS.of(tuple(parts))

    @property
    def num_pages(self) -> int:
        return self.k_cache.shape[0]

    @property
    def page_size(self) -> int:
        return self.k_cache.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.k_cache.shape[2]

    def __repr__(self) -> str:
        k, v = self.k_cache, self.v_cache
        return f"PagedKV(k={list(k.shape)}/{k.stride()}, v={list(v.shape)}/{v.stride()}, {k.dtype}, {k.device})"
