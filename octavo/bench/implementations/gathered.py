"""PyTorch's own attention. On a GPU over K/V gathered per sequence before the clock; on the CPU the gather is timed."""

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from octavo.bench.implementations.base import Implementation, Prepared, Result, require, require_plain
from octavo.bench.workloads import Inputs
from octavo.problem import AttentionSpec
from octavo.reference import gather_pages, page_ids, sequence_lengths
from octavo.shapes import Tensor

_BIAS = "torch.nn.attention.bias"
"""Imports torch._dynamo, which takes as long as PyTorch itself: only where it is used."""


@dataclass(frozen=True, eq=False)
class Sequences:
    """q [n, Hq, L, D], k and v [n, Hkv, S, D] of n sequences of the same lengths; `rows` are their token rows."""

    q: Tensor
    k: Tensor
    v: Tensor
    rows: Tensor


def gather(inputs: Inputs) -> list[Sequences]:
    """One entry per distinct pair of lengths, so that a uniform batch is one call."""
    spec = inputs.spec
    q_lens, kv_lens = sequence_lengths(inputs.batch, spec.page_size)
    starts = inputs.batch.qo_indptr.tolist()
    alike: dict[tuple[int, int], list[int]] = {}
    for sequence, lengths in enumerate(zip(q_lens, kv_lens, strict=True)):
        if lengths[0]:
            alike.setdefault(lengths, []).append(sequence)
    return [_stack(inputs, members, starts, *lengths) for lengths, members in alike.items()]


def _stack(inputs: Inputs, members: list[int], starts: list[int], q_len: int, kv_len: int) -> Sequences:
    pages = -(-kv_len // inputs.spec.page_size)
    rows = torch.stack([torch.arange(starts[m], starts[m] + q_len, device=inputs.q.device) for m in members])

    def heads_first(cache: Tensor) -> Tensor:
        gathered = [gather_pages(cache, page_ids(inputs.batch, m, pages), kv_len) for m in members]
        return torch.stack(gathered).transpose(1, 2).contiguous()

    q = inputs.q[rows].transpose(1, 2).contiguous()
    return Sequences(q, heads_first(inputs.kv.k_cache), heads_first(inputs.kv.v_cache), rows)


def scatter(inputs: Inputs, groups: list[Sequences], outs: list[Tensor]) -> Result:
    """Outputs [n, Hq, L, Dv] of the groups, each token's in its row."""
    result = inputs.q.new_zeros((inputs.q.shape[0], inputs.spec.num_qo_heads, inputs.spec.v_dim))
    for group, out in zip(groups, outs, strict=True):
        result[group.rows] = out.transpose(1, 2)
    return result, None


def _attend(group: Sequences, spec: AttentionSpec) -> Tensor:
    q_len, kv_len = group.q.shape[2], group.k.shape[2]
    gqa = spec.group_size > 1
    if not spec.causal or q_len == 1:
        return functional.scaled_dot_product_attention(group.q, group.k, group.v, enable_gqa=gqa)
    if q_len == kv_len:
        return functional.scaled_dot_product_attention(group.q, group.k, group.v, is_causal=True, enable_gqa=gqa)
    mask = importlib.import_module(_BIAS).causal_lower_right(q_len, kv_len)
    return functional.scaled_dot_product_attention(group.q, group.k, group.v, attn_mask=mask, enable_gqa=gqa)


def require_visible(inputs: Inputs) -> list[tuple[int, int]]:
    """(queries, keys) of sequences that have queries. Raises Unsupported where a row sees no key."""
    q_lens, kv_lens = sequence_lengths(inputs.batch, inputs.spec.page_size)
    pairs = [(n, m) for n, m in zip(q_lens, kv_lens, strict=True) if n]
    dead = any(m == 0 or (inputs.spec.causal and n > m) for n, m in pairs)
    require(not dead, "some rows see no key, which PyTorch's attention leaves undefined")
    return pairs


def _make_gathered(inputs: Inputs, kernel: SDPBackend) -> Prepared:
    require_plain(inputs.spec)
    pairs = require_visible(inputs)
    if kernel == SDPBackend.CUDNN_ATTENTION and inputs.spec.causal:
        aligned = all(n in (1, m) for n, m in pairs)
        require(aligned, "cuDNN attention in PyTorch has no bottom-right causal mask for fewer queries than keys")
    groups = gather(inputs)

    def run() -> list[Tensor]:
        with sdpa_kernel(kernel):
            return [_attend(group, inputs.spec) for group in groups]

    return Prepared(run=run, canonical=partial(scatter, inputs, groups))


def _make_cpu(inputs: Inputs) -> Prepared:
    """Per sequence: gather its pages, then attention with an explicit mask, all inside the clock."""
    spec = inputs.spec
    require_plain(spec)
    require_visible(inputs)
    q_lens, kv_lens = sequence_lengths(inputs.batch, spec.page_size)
    starts = inputs.batch.qo_indptr.tolist()
    live = [(m, starts[m], n, k) for m, (n, k) in enumerate(zip(q_lens, kv_lens, strict=True)) if n]
    out = inputs.q.new_empty((inputs.q.shape[0], spec.num_qo_heads, spec.v_dim))

    def run() -> tuple[Tensor, None]:
        for sequence, start, q_len, kv_len in live:
            ids = page_ids(inputs.batch, sequence, -(-kv_len // spec.page_size))
            k, v = (gather_pages(c, ids, kv_len).transpose(0, 1) for c in (inputs.kv.k_cache, inputs.kv.v_cache))
            mask = torch.ones(q_len, kv_len, dtype=torch.bool).tril(kv_len - q_len) if spec.causal else None
            q = inputs.q[start : start + q_len].transpose(0, 1)
            attended = functional.scaled_dot_product_attention(
                q[None], k[None], v[None], attn_mask=mask, scale=1 / math.sqrt(spec.head_dim), enable_gqa=True
            )
            out[start : start + q_len] = attended[0].transpose(0, 1)
        return out, None

    return Prepared(run=run, buffers=(out,))


_MAKE: dict[str, Callable[[Inputs], Prepared]] = {
    "sdpa-flash": partial(_make_gathered, kernel=SDPBackend.FLASH_ATTENTION),
    "sdpa-cudnn": partial(_make_gathered, kernel=SDPBackend.CUDNN_ATTENTION),
    "sdpa-gather": _make_cpu,
}


def load(name: str) -> Implementation:
    if name == "sdpa-flash":
        importlib.import_module(_BIAS)
    return Implementation(name, _MAKE[name], {"torch": torch.__version__})
