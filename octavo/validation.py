"""The one validator: shapes, dtypes, devices, strides always; values where reading them is free or asked for."""

import functools
import math
from typing import Any

import torch

from octavo.errors import fail
from octavo.kv_cache import PagedKV
from octavo.problem import KV_DTYPES, AttentionSpec, PagedBatch
from octavo.shapes import Tensor
from octavo.variants import check_mask


def spec_of(q: Tensor, kv: PagedKV, causal: bool = True, **variants: Any) -> AttentionSpec:
    """The spec that the tensors' shapes and dtypes imply; variants: further fields."""
    if not isinstance(q, Tensor):
        fail("q", "a tensor", type(q).__name__, "pass q as [tokens, qo_heads, head_dim]", TypeError)
    if q.dim() != 3:
        fail("q", "3 dimensions [tokens, qo_heads, head_dim]", f"shape {list(q.shape)}", "q.view(tokens, heads, dim)")
    value_dim = kv.v_cache.shape[3]
    if kv.k_cache.dtype in KV_DTYPES:
        variants["kv_dtype"] = kv.k_cache.dtype
    make = AttentionSpec if torch.compiler.is_compiling() else _spec  # Dynamo traces no cache.
    return make(q.shape[1], kv.num_kv_heads, q.shape[2], value_dim, kv.page_size, causal, q.dtype, **variants)


# Specs of a model are few and asked for at every call; a raised error is not kept.
_spec = functools.lru_cache(maxsize=256)(AttentionSpec)


def check_call(spec: AttentionSpec, q: Tensor, kv: PagedKV, batch: PagedBatch) -> None:
    """Everything about one attention call that does not need tensor contents."""
    check_shape("q", q, (None, spec.num_qo_heads, spec.head_dim))
    check_cache(spec, kv)
    if q.dtype != spec.dtype:
        fail("q", f"dtype {spec.dtype} as the spec says", q.dtype, f"q.to({spec.dtype})", TypeError)
    check_last_dim("q", q)
    check_no_grad(q=q, k_cache=kv.k_cache, v_cache=kv.v_cache)
    check_batch(spec, batch)
    check_device("k_cache", kv.k_cache, q.device)
    check_device("qo_indptr", batch.qo_indptr, q.device)


def check_cache(spec: AttentionSpec, kv: PagedKV) -> None:
    k, v = kv.k_cache, kv.v_cache
    check_shape("k_cache", k, (None, spec.page_size, spec.num_kv_heads, spec.head_dim))
    check_shape("v_cache", v, (k.shape[0], spec.page_size, spec.num_kv_heads, spec.v_dim))
    for name, x in (("k_cache", k), ("v_cache", v)):
        if x.dtype != spec.cache_dtype:
            like = "like q" if spec.kv_dtype is None else "as the spec says"
            fail(name, f"dtype {spec.cache_dtype} {like}", x.dtype, f"{name}.to({spec.cache_dtype})", TypeError)
        check_last_dim(name, x)
    check_device("v_cache", v, k.device)


def check_batch(spec: AttentionSpec, batch: PagedBatch) -> None:
    if not batch.is_dense and spec.page_size > 1 and batch.last_page_len is None:
        fail(
            "last_page_len",
            f"a tensor of one length per sequence (page_size is {spec.page_size})",
            None,
            "pass the number of keys in each sequence's last page, 1 to page_size",
        )
    if spec.custom_mask != (batch.custom_mask is not None):
        expected = (
            "a mask as the spec has custom_mask" if spec.custom_mask else "no mask as the spec has no custom_mask"
        )
        fail("batch", expected, repr(batch), "AttentionSpec(..., custom_mask=True) goes with batch.with_mask(mask)")


def check_outputs(spec: AttentionSpec, q: Tensor, out: Tensor | None, lse: Tensor | None) -> None:
    if (out is None) != (lse is None):
        fail("out and lse", "both or neither", "one of them", "pass both buffers, or let octavo allocate both")
    if out is None or lse is None:
        return
    check_shape("out", out, (q.shape[0], spec.num_qo_heads, spec.v_dim))
    check_shape("lse", lse, (q.shape[0], spec.num_qo_heads))
    if out.dtype != q.dtype:
        fail("out", f"dtype {q.dtype} like q", out.dtype, f"torch.empty(..., dtype={q.dtype})", TypeError)
    if lse.dtype != torch.float32:
        fail("lse", "dtype torch.float32", lse.dtype, "torch.empty(..., dtype=torch.float32)", TypeError)
    check_last_dim("out", out)
    check_writable("out", out)
    check_writable("lse", lse)
    for name, x in (("out", out), ("lse", lse)):
        check_device(name, x, q.device)


def check_shape(name: str, x: object, shape: tuple[int | None, ...]) -> None:
    """The first dimension may be None: any."""
    if not isinstance(x, Tensor):
        fail(name, "a tensor", type(x).__name__, f"pass {name} as a torch.Tensor", TypeError)
    got = tuple(x.shape)
    if len(got) != len(shape) or got[1:] != shape[1:] or (shape[0] is not None and got[0] != shape[0]):
        wanted = ["any" if n is None else n for n in shape]
        fail(name, f"shape {wanted}", list(got), "shapes follow from q and the cache; see AttentionSpec")


def check_last_dim(name: str, x: Tensor) -> None:
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        fail(name, "a contiguous last dimension", f"strides {x.stride()}", f"{name}.contiguous()")


def check_writable(name: str, x: Tensor) -> None:
    """No two elements of what is written may share an address: strides must nest."""
    extent = 1
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1):
        if stride < extent:
            fail(name, "elements at different addresses", f"strides {x.stride()}", f"{name}.clone()")
        extent = stride * size


def check_device(name: str, x: Tensor, device: torch.device) -> None:
    if x.device != device:
        fail(name, f"on {device} like q", x.device, f"{name}.to({str(device)!r})")


def check_no_grad(**tensors: Tensor) -> None:
    if torch.is_grad_enabled():
        for name, x in tensors.items():
            if x.requires_grad:
                fail(name, "no gradient (there is no backward pass)", "requires_grad=True", "use torch.no_grad()")


def check_scale(sm_scale: float | Tensor | None, default: float, device: torch.device) -> tuple[float, Tensor | None]:
    """(float, None) or, when the scale is a tensor on the GPU that must not be read, (1.0, tensor)."""
    if sm_scale is None:
        return default, None
    if isinstance(sm_scale, Tensor):
        if sm_scale.numel() != 1 or not sm_scale.is_floating_point():
            got = f"{list(sm_scale.shape)} {sm_scale.dtype}"
            fail("sm_scale", "a float or a 0-d floating-point tensor", got, "one scale per call: torch.tensor(0.125)")
        if torch.compiler.is_compiling() or (sm_scale.device == device and device.type != "cpu"):
            return 1.0, sm_scale.reshape(()).to(torch.float32)
        sm_scale = sm_scale.item()
    if isinstance(sm_scale, bool) or not isinstance(sm_scale, (int, float)):
        fail("sm_scale", "a float or a 0-d tensor", type(sm_scale).__name__, "1 / math.sqrt(head_dim)", TypeError)
    if math.isnan(sm_scale) or math.isinf(sm_scale):
        fail("sm_scale", "a finite number", sm_scale, "1 / math.sqrt(head_dim)")
    return float(sm_scale), None


def reads_values(x: Tensor, validate: bool) -> bool:
    """Whether the contents of index tensors beside x are checked: on the CPU always, on a GPU when asked."""
    return (validate or x.device.type == "cpu") and not torch.compiler.is_compiling()


def check_values(spec: AttentionSpec, batch: PagedBatch, num_tokens: int | None, num_pages: int | None) -> None:
    """Contents of the index tensors. Synchronises on a GPU. None skips what needs the count."""
    qo = batch.qo_indptr
    if int(qo[0]) != 0:
        fail("qo_indptr", "0 first", int(qo[0]), "offsets start at the first row of q")
    _check_rising("qo_indptr", qo)
    if num_tokens is not None and int(qo[-1]) > num_tokens:
        fail("qo_indptr", f"at most {num_tokens} (rows of q) last", int(qo[-1]), "q holds one row per query token")
    if batch.is_dense:
        _check_dense_values(spec, batch, num_pages)
    else:
        _check_csr_values(spec, batch, num_pages)
    if batch.custom_mask is not None:
        check_mask(spec, batch)


def _check_rising(name: str, x: Tensor) -> None:
    if bool((x[1:] < x[:-1]).any()):
        where = int((x[1:] < x[:-1]).nonzero()[0])
        fail(name, "offsets that never fall", f"{x[where].item()} then {x[where + 1].item()}", "use cumulative sums")


def _check_csr_values(spec: AttentionSpec, batch: PagedBatch, num_pages: int | None) -> None:
    ptr = batch.kv_indptr
    assert ptr is not None
    _check_rising("kv_indptr", ptr)
    entries = batch.page_table.shape[0]
    if int(ptr[0]) < 0 or int(ptr[-1]) > entries:
        got = f"{int(ptr[0])} to {int(ptr[-1])}"
        fail("kv_indptr", f"offsets from 0 to {entries} (length of kv_indices)", got, "offsets count pages, not keys")
    if batch.last_page_len is not None:
        last = batch.last_page_len[(ptr[1:] > ptr[:-1]).to(batch.last_page_len.device)]
        _check_range("last_page_len", last, 1, spec.page_size, "count the keys in the last page, 1 to page_size")
    if num_pages is not None:
        used = batch.page_table[int(ptr[0]) : int(ptr[-1])]
        _check_range("kv_indices", used, 0, num_pages - 1, "page ids index the first dimension of k_cache")


def _check_dense_values(spec: AttentionSpec, batch: PagedBatch, num_pages: int | None) -> None:
    kv_lens = batch.kv_lens
    assert kv_lens is not None
    capacity = batch.page_table.shape[1] * spec.page_size
    _check_range("kv_lens", kv_lens, 0, capacity, "block_table needs a column per page of the longest sequence")
    if num_pages is not None and batch.num_sequences:
        column = torch.arange(batch.page_table.shape[1], device=batch.device)[None]
        used = batch.page_table[column * spec.page_size < kv_lens[:, None]]
        _check_range("block_table", used, 0, num_pages - 1, "page ids index the first dimension of k_cache")


def _check_range(name: str, x: Tensor, low: int, high: int, fix: str) -> None:
    if x.numel():
        smallest, largest = int(x.min()), int(x.max())
        if smallest < low or largest > high:
            fail(name, f"values from {low} to {high}", f"{smallest} to {largest}", fix)
