"""What is to be computed: frozen, self-validating, printable values. Nothing here touches tensor contents."""

import dataclasses
import math
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch

from octavo.errors import fail
from octavo.paged_batch import INDEX_DTYPES, PagedBatch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
KV_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256


@dataclass(frozen=True)
class AttentionSpec:
    """The static part of a problem: everything that selects a kernel, nothing that changes from step to step.

    Args:
        num_qo_heads: query heads Hq.
        num_kv_heads: K/V heads Hkv; must divide Hq. Query head h reads K/V head h // (Hq / Hkv).
        head_dim: elements per query and key head, 16 to 256.
        value_dim: elements per value head, 16 to 256; None means head_dim.
        page_size: keys per page, any integer >= 1.
        causal: bottom-right aligned: query i of a sequence sees keys j <= i + kv_len - q_len.
        dtype: of q, k and v: bfloat16, float16 or float32.
        window_left: keys before its own position that a row sees; -1 means all. Row t of a sequence has the position
            i = kv_len - q_len + t and sees keys j >= i - window_left.
        window_right: keys after its own position that a row sees, j <= i + window_right; -1 means all. Not with causal.
        logits_soft_cap: c > 0 makes logits s into c * tanh(s / c); 0 leaves them.
        sinks: every call brings a logit per query head that joins the softmax's denominator.
        alibi: every call brings a slope per query head; slope * (j - i) is added to the scaled logits, before the cap.
        custom_mask: the batch brings a mask per sequence, see `PagedBatch.with_mask`. It replaces causal.
        kv_dtype: of k and v where it is not dtype's: float8_e4m3fn or float8_e5m2.

    Raises:
        ValueError, TypeError: with what was expected, what came and how to fix it.

    >>> AttentionSpec(num_qo_heads=32, num_kv_heads=4, head_dim=128).group_size
    8
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None
    page_size: int = 1
    causal: bool = True
    dtype: torch.dtype = torch.bfloat16
    _: KW_ONLY
    window_left: int = -1
    window_right: int = -1
    logits_soft_cap: float = 0.0
    sinks: bool = False
    alibi: bool = False
    custom_mask: bool = False
    kv_dtype: torch.dtype | None = None
    _variants: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        if self.value_dim is None:
            object.__setattr__(self, "value_dim", self.head_dim)
        for name in ("num_qo_heads", "num_kv_heads", "head_dim", "value_dim", "page_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                fail(name, "an int", repr(value), "pass a plain Python int", TypeError)
            if value < 1:
                fail(name, "at least 1", value, f"pass the model's {name}")
        for name in ("head_dim", "value_dim"):
            if not MIN_HEAD_DIM <= getattr(self, name) <= MAX_HEAD_DIM:
                limits = f"{MIN_HEAD_DIM} to {MAX_HEAD_DIM}"
                fail(name, limits, getattr(self, name), "pad the heads with zeros and pass the unpadded sm_scale")
        if self.num_qo_heads % self.num_kv_heads:
            multiple = f"a multiple of num_kv_heads={self.num_kv_heads}"
            fail("num_qo_heads", multiple, self.num_qo_heads, "every K/V head serves the same number of query heads")
        if not isinstance(self.causal, bool):
            fail("causal", "a bool", repr(self.causal), "pass True or False", TypeError)
        if self.dtype not in DTYPES:
            fail("dtype", "bfloat16, float16 or float32", self.dtype, "cast q, k and v", TypeError)
        if self.kv_dtype == self.dtype:
            object.__setattr__(self, "kv_dtype", None)
        _check_variants(self)
        used = tuple(name for name, plain in PLAIN_VALUES.items() if getattr(self, name) != plain)
        object.__setattr__(self, "_variants", used)

    @property
    def variants(self) -> tuple[str, ...]:
        """The names of the variants that are used, in field order."""
        return self._variants

    @property
    def is_plain(self) -> bool:
        """Whether no variant is used."""
        return not self._variants

    @property
    def cache_dtype(self) -> torch.dtype:
        """dtype of k and v."""
        return self.dtype if self.kv_dtype is None else self.kv_dtype

    @property
    def group_size(self) -> int:
        """Query heads per K/V head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def v_dim(self) -> int:
        """value_dim as an int."""
        assert self.value_dim is not None  # set in __post_init__
        return self.value_dim

    @property
    def default_scale(self) -> float:
        """1 / sqrt(head_dim)."""
        return 1.0 / math.sqrt(self.head_dim)

    def __repr__(self) -> str:
        names = [f.name for f in dataclasses.fields(self) if f.name not in PLAIN_VALUES or f.name in self._variants]
        return f"AttentionSpec({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"


PLAIN_VALUES: dict[str, object] = {
    "window_left": -1,
    "window_right": -1,
    "logits_soft_cap": 0.0,
    "sinks": False,
    "alibi": False,
    "custom_mask": False,
    "kv_dtype": None,
}
"""The variants, each with the value that leaves it out."""


def _check_variants(spec: AttentionSpec) -> None:
    for name in ("window_left", "window_right"):
        value = getattr(spec, name)
        if not isinstance(value, int) or isinstance(value, bool):
            fail(name, "an int", repr(value), "pass a plain Python int, -1 for no window", TypeError)
        if value < -1:
            fail(name, "at least -1", value, "-1 means no window, 0 the row's own key alone")
    if spec.window_right >= 0 and spec.causal:
        got = f"window_right={spec.window_right} and causal=True"
        fail("window_right", "-1 where causal", got, "a causal row sees no later key: pass causal=False, or -1")
    cap = spec.logits_soft_cap
    if not isinstance(cap, (int, float)) or isinstance(cap, bool):
        fail("logits_soft_cap", "a float", repr(cap), "pass a plain Python float, 0.0 for none", TypeError)
    if not 0.0 <= cap < math.inf:
        fail("logits_soft_cap", "a finite number, 0 or more", cap, "0.0 means no cap")
    for name in ("sinks", "alibi", "custom_mask"):
        value = getattr(spec, name)
        if not isinstance(value, bool):
            fix = f"the spec says whether there are {name}; the values go with the call"
            fail(name, "a bool", type(value).__name__, fix, TypeError)
    if spec.kv_dtype is not None and spec.kv_dtype not in KV_DTYPES:
        fail("kv_dtype", f"{spec.dtype}, float8_e4m3fn, float8_e5m2 or None", spec.kv_dtype, "cast k and v", TypeError)


@dataclass(frozen=True)
class Arch:
    """The device that a kernel is chosen for."""

    kind: str
    """"cpu", "cuda", "hip", or "interpreter" (Triton's, on the CPU)."""
    capability: tuple[int, int] = (0, 0)
    num_sms: int = 1
    name: str = "CPU"

    @property
    def sm(self) -> int:
        """Compute capability as one number: 90 for sm_90, 0 where there is none."""
        return 10 * self.capability[0] + self.capability[1]


__all__ = ["DTYPES", "INDEX_DTYPES", "KV_DTYPES", "PLAIN_VALUES", "Arch", "AttentionSpec", "PagedBatch"]
