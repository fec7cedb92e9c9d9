"""Which backend serves what, with reasons; the sm_90 kernel's probe, its limits and its TMA descriptors. No GPU."""

import ctypes
import importlib
import importlib.util
import math
import os
import warnings

import pytest
import torch

from octavo import AttentionSpec, BatchAttention, PagedBatch, batch_attention
from octavo.backends import AttentionCall, catalog, hopper, portable, resolve, runs, tensor_maps
from octavo.backends import triton as triton_backend
from octavo.backends.launch import Launch
from octavo.backends.tensor_maps import RUNS_FLAT, RUNS_IN_PAGE, RUNS_NEVER, box_rows, run_form
from octavo.bench.workloads import Workload, make_inputs
from octavo.problem import Arch

HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
compiles = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
H200, A100 = Arch("cuda", (9, 0), 132, "H200"), Arch("cuda", (8, 0), 108, "A100")
SPEC = AttentionSpec(32, 4, 128)


@pytest.fixture(autouse=True)
def nothing_remembered():
    """What one test finds, or patches, is not what another sees."""
    caches = (resolve, hopper.compile_failure)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def probe(monkeypatch):
    """Builds that were probed; `error` is what the next ones raise."""

    class Probe:
        def __init__(self):
            self.built, self.error = [], None

        def __call__(self, build, sm):
            self.built.append((build.name, sm))
            if self.error:
                raise self.error

    found = Probe()
    monkeypatch.setattr(catalog.KernelBuild, "compile", lambda build, sm: found(build, sm))
    return found


# Choice


@needs_triton
@compiles
def test_the_sm_90_kernel_is_chosen_and_compiles():
    choice = resolve(SPEC, H200)
    assert choice.backend.name == "hopper"
    assert dict(choice.rejected)["triton"] == "hopper is preferred"


@needs_triton
@pytest.mark.parametrize(
    ("spec", "arch", "reason"),
    [
        (AttentionSpec(32, 4, 80), H200, "needs head_dim and value_dim alike, one of (64, 128, 256), got 80 and 80"),
        (AttentionSpec(16, 16, 192, 128), H200, "got 192 and 128"),
        (AttentionSpec(32, 4, 128, dtype=torch.float32), H200, "needs bfloat16 or float16, got torch.float32"),
        (SPEC, A100, "needs compute capability 9.0, A100 is another device"),
        (SPEC, Arch("cuda", (10, 0), 148, "B200"), "needs compute capability 9.0, B200 is another device"),
        (SPEC, Arch("hip", (9, 0), 304, "MI300X"), "needs compute capability 9.0, MI300X is another device"),
    ],
    ids=["head_dim", "value_dim", "dtype", "sm_80", "sm_100", "hip"],
)
def test_the_portable_kernel_serves_the_rest(spec, arch, reason, probe):
    choice = resolve(spec, arch)
    assert choice.backend.name == "triton" and reason in dict(choice.rejected)["hopper"]
    assert probe.built == [], "compiled for nothing"
    with pytest.raises(ValueError, match="expected one that serves"):
        resolve(spec, arch, "hopper")


def test_the_cpu_is_another_device():
    choice = resolve(SPEC, Arch("cpu"))
    assert choice.backend.name == "cpu" and "needs compute capability 9.0" in dict(choice.rejected)["hopper"]


@needs_triton
def test_append_and_merge_need_no_spec_and_probe_nothing(probe):
    assert resolve(None, H200).backend.name == "hopper" and probe.built == []


def test_without_triton_neither_kernel_serves(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None)
    with pytest.raises(ValueError, match=r"hopper: Triton is not installed; triton: Triton is not installed"):
        resolve(SPEC, H200)


# Probe


@needs_triton
def test_probe_failure_falls_back_with_one_warning(probe, monkeypatch):
    probe.error = NotImplementedError("no such operation")
    monkeypatch.setattr(batch_attention, "arch_of", lambda device: H200)
    with pytest.warns(RuntimeWarning, match="the portable one serves: .*no such operation") as warned:
        first = BatchAttention(SPEC, device="cpu")
    assert len(warned) == 1 and first.choice.backend.name == "triton"
    assert "not hopper: this Triton does not compile it: NotImplementedError: no such operation" in first.explain()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resolve.cache_clear()
        assert BatchAttention(SPEC, device="cpu").choice == first.choice
    assert len(probe.built) == 1 and probe.built[0][1] == 90


@needs_triton
def test_a_triton_without_gluon(monkeypatch, probe):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if "gluon" in name else find(name))
    choice = resolve(SPEC, H200)
    assert choice.backend.name == "triton" and dict(choice.rejected)["hopper"] == "this Triton has no Gluon"
    assert probe.built == []


# Limits of a call


def call_of(q=None, k_cache=None, v_cache=None, out=None, lse=None):
    """A call on meta tensors, which have shapes and strides of any size and no memory."""
    q = torch.empty(5, 32, 128, dtype=torch.bfloat16, device="meta") if q is None else q
    cache = torch.empty(9, 1, 4, 128, dtype=torch.bfloat16, device="meta")
    k_cache, v_cache = (cache if x is None else x for x in (k_cache, v_cache))
    out = torch.empty_like(q) if out is None else out
    lse = torch.empty(q.shape[:2], device="meta") if lse is None else lse
    index = torch.zeros(2, dtype=torch.int32)
    return AttentionCall(SPEC, PagedBatch.csr(index, index, index), q, k_cache, v_cache, out, lse, 1.0)


def meta(*shape, strides=None, dtype=torch.bfloat16):
    if strides is None:
        return torch.empty(*shape, dtype=dtype, device="meta")
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


UNITS = 1 << 32  # offsets count 16 bytes in 32 bits
REACHED = {
    "ordinary": {},
    "q between other heads": {"q": meta(5, 32, 128, strides=(5120, 128, 1))},
    "head-major q": {"q": meta(5, 32, 128, strides=(128, 640, 1))},
    "last unit": {"k_cache": meta(2, 1, 4, 128, strides=(8 * UNITS - 8 * 128, 512, 128, 1))},
    "stride of 0": {"k_cache": meta(9, 1, 4, 128, strides=(128, 128, 0, 1))},
    "2^31 - 1 keys": {"k_cache": meta(2**31 - 1, 1, 4, 128, strides=(8, 8, 0, 1))},
}
NOT_REACHED = {
    "odd q": {"q": meta(5, 32, 128, strides=(4097, 128, 1))},
    "odd heads": {"out": meta(5, 32, 128, strides=(32 * 132, 132, 1))},
    "odd keys": {"v_cache": meta(9, 1, 4, 128, strides=(516, 516, 128, 1))},
    "no pages": {"k_cache": meta(0, 1, 4, 128)},
    "past the last unit": {"k_cache": meta(2, 1, 4, 128, strides=(8 * UNITS, 512, 128, 1))},
    "2^31 keys": {"k_cache": meta(2**31, 1, 4, 128, strides=(8, 8, 0, 1))},
    "lse past 2^31": {"lse": meta(5, 32, strides=(2**29, 1), dtype=torch.float32)},
}


@pytest.mark.parametrize("tensors", REACHED.values(), ids=REACHED)
def test_reached(tensors):
    assert hopper._is_addressable(call_of(**tensors))


@pytest.mark.parametrize("tensors", NOT_REACHED.values(), ids=NOT_REACHED)
def test_not_reached(tensors):
    assert not hopper._is_addressable(call_of(**tensors))


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "out"])
def test_tensors_off_16_bytes_are_not_taken(name):
    shape = (5, 32, 128) if name in ("q", "out") else (9, 1, 4, 128)
    memory = torch.zeros(math.prod(shape) + 8, dtype=torch.bfloat16)
    start = -memory.data_ptr() % 16 // 2
    assert hopper._is_addressable(call_of(**{name: memory[start:][: math.prod(shape)].view(shape)}))
    assert not hopper._is_addressable(call_of(**{name: memory[start + 1 :][: math.prod(shape)].view(shape)}))


def test_one_key_a_page_is_strided_by_pages():
    """PyTorch leaves the stride of a dimension of size 1 to chance."""
    cache = meta(9, 1, 4, 128, strides=(4096, 7, 128, 1))
    assert hopper._cache_strides(cache) == (4096, 4096, 128)
    assert hopper._cache_strides(meta(9, 16, 4, 128)) == (16 * 512, 512, 128)


# TMA descriptors


@pytest.mark.parametrize(
    ("cache", "form"),
    [
        (meta(9, 1, 4, 128), RUNS_FLAT),
        (meta(9, 1, 4, 128, strides=(4096, 7, 128, 1)), RUNS_FLAT),
        (meta(9, 16, 4, 128), RUNS_FLAT),
        (meta(9, 3, 4, 128), RUNS_FLAT),
        (meta(9, 2, 16, 4, 128)[:, 1], RUNS_IN_PAGE),
        (meta(9, 2, 64, 4, 128)[:, 0], RUNS_IN_PAGE),
        (meta(9, 2, 24, 4, 128)[:, 0], RUNS_NEVER),
        (meta(9, 2, 3, 4, 128)[:, 0], RUNS_NEVER),
        (meta(9, 4, 16, 128).transpose(1, 2), RUNS_IN_PAGE),
        (meta(9, 4, 1, 128).transpose(1, 2), RUNS_FLAT),
    ],
    ids=[
        "ps1",
        "ps1 strided",
        "ps16",
        "ps3",
        "combined 16",
        "combined 64",
        "combined 24",
        "combined 3",
        "hnd",
        "hnd 1",
    ],
)
def test_where_runs_lie(cache, form):
    assert run_form(cache) == form


@pytest.mark.parametrize(("page_size", "rows"), [(1, 32), (3, 32), (16, 16), (48, 16), (32, 32), (64, 32), (24, 32)])
def test_rows_of_a_box(page_size, rows):
    """A box lies within a page where pages hold boxes."""
    assert box_rows(page_size) == rows


@pytest.fixture
def encoded(monkeypatch):
    """(shape, strides in bytes, box) of each descriptor asked for."""
    asked = []

    class Driver:
        @staticmethod
        def cuTensorMapEncodeTiled(place, kind, rank, address, shape, strides, box, *rest):
            assert (
                rank == len(shape) == len(strides) + 1 == len(box)
                and ctypes.cast(place, ctypes.c_void_p).value % 64 == 0
            )
            asked.append((list(shape), list(strides), list(box)))
            return 0

    monkeypatch.setattr(tensor_maps, "_driver", lambda: Driver)
    return asked


@pytest.mark.parametrize(
    ("cache", "form", "shape", "strides", "rows"),
    [
        (meta(9, 1, 4, 128), RUNS_FLAT, [128, 9, 4, 1], [1024, 256], 32),
        (meta(9, 1, 4, 128, strides=(4096, 7, 128, 1)), RUNS_FLAT, [128, 9, 4, 1], [8192, 256], 32),
        (meta(9, 16, 4, 64), RUNS_FLAT, [64, 144, 4, 1], [512, 128], 16),
        (meta(9, 2, 64, 4, 128)[:, 1], RUNS_IN_PAGE, [128, 64, 4, 9], [1024, 256, 2 * 64 * 1024], 32),
        (meta(9, 1, 64, 128).transpose(1, 2), RUNS_FLAT, [128, 576, 1, 1], [256, 256], 32),
        (meta(9, 4, 16, 128).transpose(1, 2), RUNS_IN_PAGE, [128, 16, 4, 9], [256, 4096, 4 * 4096], 16),
    ],
    ids=["ps1", "ps1 strided", "ps16", "combined", "one head", "hnd"],
)
def test_descriptors(cache, form, shape, strides, rows, encoded):
    """A tensor (column, key, head, page); the last stride is unused where all pages are one list of keys."""
    assert run_form(cache) == form
    assert len(tensor_maps._encode(cache, form)) == tensor_maps.MAP_BYTES
    ((got_shape, got_strides, box),) = encoded
    assert got_shape == shape and got_strides[: len(strides)] == strides
    assert box == [64, rows, 1, 1]
    assert all(stride % 16 == 0 for stride in got_strides)


# Launches


@needs_triton
@compiles
@pytest.mark.parametrize(
    ("qo_lens", "kv_lens", "expected"),
    [
        ((256,), (512,), ["plan_kernel", "attention_hopper_kernel"]),
        ((64,), (30000,), ["plan_kernel", "attention_hopper_kernel"]),
        ((256, 1, 1), (512, 3000, 40), ["plan_kernel", "attention_hopper_kernel", "attention_kernel"]),
        ((1, 1), (4096, 4096), ["attention_inline_kernel"]),
        ((1,) * 300, (2048,) * 300, ["plan_kernel", "attention_kernel"]),
    ],
    ids=["prefill", "cut prefill", "mixed", "decode", "many"],
)
def test_what_is_launched_fits_the_kernels_signatures(qo_lens, kv_lens, expected, monkeypatch):
    """A launcher that lags behind its kernel, or behind what it shares with others, shows without a GPU."""
    launched = []

    def launch(self, grid, arguments):
        kernel = getattr(importlib.import_module(self._module), self._name)
        names, constants = kernel.arg_names, list(self._constants)
        assert len(arguments) + len(constants) == len(names) and constants == names[len(arguments) :]
        assert all(n > 0 for n in grid)
        launched.append(self._name)

    for module in (hopper, triton_backend, portable, runs):
        monkeypatch.setattr(module, "arch_of", lambda device: H200)
    monkeypatch.setattr(Launch, "__call__", launch)
    monkeypatch.setattr(hopper, "current_stream", lambda device: 0)
    monkeypatch.setattr(hopper.MAPS, "find", lambda *_: torch.empty(256, dtype=torch.uint8), raising=False)
    x = make_inputs(Workload("launches", qo_lens, kv_lens), SPEC, "cpu")
    out, lse = torch.empty_like(x.q), torch.empty(x.q.shape[:2])
    call = AttentionCall(SPEC, x.batch, x.q, x.kv.k_cache, x.kv.v_cache, out, lse, SPEC.default_scale)
    backend = hopper.HopperBackend()
    backend.attend(call)
    assert launched == expected
