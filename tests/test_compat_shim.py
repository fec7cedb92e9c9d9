"""The module named flashinfer: its names, who serves what, and pytest runs through it."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from inputs import FP32, I32, Case, build

from octavo import AttentionSpec, PagedBatch
from octavo.compat import flashinfer as fi
from octavo.compat import flashinfer_reference, flashinfer_shim
from octavo.reference import reference


@pytest.fixture
def shim():
    """install, and sys.modules and sys.meta_path afterwards as before."""
    modules, finders = dict(sys.modules), list(sys.meta_path)
    yield flashinfer_shim.install
    for name in [name for name in sys.modules if name.partition(".")[0] == "flashinfer"]:
        del sys.modules[name]
    sys.modules.update({name: module for name, module in modules.items() if name.startswith("flashinfer")})
    sys.meta_path[:] = finders


def test_names_and_submodules(shim):
    shim()
    import flashinfer
    import flashinfer.decode
    from flashinfer.jit import MissingJITCacheError
    from flashinfer.utils import get_compute_capability, has_flashinfer_jit_cache

    assert flashinfer.BatchAttention is fi.BatchAttention is flashinfer.attention.BatchAttention
    assert flashinfer.prefill.BatchPrefillWithRaggedKVCacheWrapper is fi.BatchPrefillWithRaggedKVCacheWrapper
    assert flashinfer.decode.single_decode_with_kv_cache is fi.single_decode_with_kv_cache
    assert flashinfer.cascade.merge_state is fi.merge_state and flashinfer.page.get_seq_lens is fi.get_seq_lens
    assert has_flashinfer_jit_cache() and len(get_compute_capability()) == 2
    assert issubclass(MissingJITCacheError, Exception)
    with pytest.raises(NotImplementedError, match=r"flashinfer\.rope\.apply_rope"):
        flashinfer.rope.apply_rope(torch.ones(1))
    with pytest.raises(NotImplementedError, match=r"SegmentGEMMWrapper\.run"):
        flashinfer.gemm.SegmentGEMMWrapper.run()
    with pytest.raises(ImportError):
        __import__("flashinfer.moe_ep")


def test_who_serves_single_calls(shim):
    module = shim("reference")
    assert module.prefill.single_prefill_with_kv_cache is flashinfer_reference.single_prefill_with_kv_cache
    assert module.single_decode_with_kv_cache is flashinfer_reference.single_decode_with_kv_cache
    assert module.BatchAttention is fi.BatchAttention
    with pytest.raises(ValueError, match="single"):
        shim("torch")


@pytest.mark.parametrize("causal", (True, False))
@pytest.mark.parametrize("lens", ((5, 9), (9, 5), (3, 0)), ids=str)
def test_the_reference_is_the_oracle(causal, lens):
    p = build(Case("one", lens[:1], lens[1:], dtype=FP32, causal=causal, padding=0, scattered=False))
    ids = p.batch.page_table[: lens[1]].long()
    k, v = p.kv.k_cache[ids, 0], p.kv.v_cache[ids, 0]
    out, lse = flashinfer_reference.single_prefill_with_kv_cache(
        p.q, k.transpose(0, 1), v.transpose(0, 1), causal=causal, kv_layout="HND", return_lse=True
    )
    exact_out, exact_lse = p.expected()
    torch.testing.assert_close(out.double(), exact_out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-6)


def test_variants_of_the_reference():
    """Windows and masks against a plain mask; soft-cap and ALiBi leave out rows' softmax at its fixed points."""
    torch.manual_seed(0)
    q, k, v = torch.randn(4, 2, 32), torch.randn(7, 1, 32), torch.randn(7, 1, 32)
    row, key = torch.arange(4)[:, None], torch.arange(7)[None]
    mask = (key <= row + 3) & (key >= row + 3 - 2)
    windowed = flashinfer_reference.single_prefill_with_kv_cache(q, k, v, causal=True, window_left=2)
    for masks in ({"custom_mask": mask}, {"packed_custom_mask": flashinfer_reference.packbits(mask, "little")}):
        masked = flashinfer_reference.single_prefill_with_kv_cache(q, k, v, **masks)
        torch.testing.assert_close(masked, windowed)
    capped = flashinfer_reference.single_prefill_with_kv_cache(q, k, v, logits_soft_cap=1e4)
    torch.testing.assert_close(capped, flashinfer_reference.single_prefill_with_kv_cache(q, k, v), rtol=1e-3, atol=1e-4)
    tiny = flashinfer_reference.single_prefill_with_kv_cache(q, k, v, logits_soft_cap=1e-6)
    torch.testing.assert_close(tiny, v.mean(0).expand(4, 2, 32), rtol=1e-4, atol=1e-5)
    biased = flashinfer_reference.single_prefill_with_kv_cache(q * 0, k, v, pos_encoding_mode="ALIBI")
    weights = torch.softmax(torch.tensor([2.0**-4, 2.0**-8])[:, None] * torch.arange(7.0), -1)
    torch.testing.assert_close(biased[0], weights @ v[:, 0])


def test_packed_bits():
    bits = torch.tensor([1, 0, 0, 0, 0, 0, 0, 0, 1, 1], dtype=torch.bool)
    assert flashinfer_reference.packbits(bits).tolist() == [128, 192]
    packed, edges = flashinfer_reference.segment_packbits(bits, torch.tensor([0, 1, 10]), "little")
    assert packed.tolist() == [1, 128, 1] and edges.tolist() == [0, 1, 3]


def test_pytest_through_the_shim(tmp_path):
    """A file as FlashInfer's are: on cuda:0, judged by its own single_prefill, skipping what is not carried."""
    (tmp_path / "test_paged.py").write_text(
        textwrap.dedent(
            """
            import subprocess, sys
            import pytest, torch, flashinfer

            @pytest.mark.parametrize("mode", ["NONE", "ROPE_LLAMA"])
            def test_paged(mode):
                q = torch.randn(3, 4, 64, device="cuda:0", dtype=torch.float16)
                cache = torch.randn(2, 2, 4, 2, 64).half().to("cuda:0")
                tables = [torch.tensor(x, dtype=torch.int32).to(0) for x in ([0, 3], [0, 2], [1, 0], [3])]
                wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(torch.empty(8, device="cuda:0"))
                wrapper.plan(*tables, 4, 2, 64, 4, causal=True, pos_encoding_mode=mode)
                k, v = (x[[1, 0]].flatten(0, 1)[:7] for x in cache.unbind(1))
                expected = flashinfer.prefill.single_prefill_with_kv_cache(q, k, v, causal=True)
                torch.testing.assert_close(wrapper.run(q, cache), expected, rtol=1e-3, atol=1e-3)

            def test_child():
                code = "import flashinfer; print(flashinfer.merge_state.__module__)"
                assert "octavo" in subprocess.check_output([sys.executable, "-c", code], text=True)

            @pytest.mark.parametrize("n", range(9))
            def test_sampled(n):
                assert n == n
            """
        )
    )
    command = [sys.executable, "-m", "octavo.compat.flashinfer_shim", "--cpu", "--sample", "2", "-rs", "test_paged.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed, 1 skipped, 7 deselected" in done.stdout and "ROPE_LLAMA" in done.stdout


def test_reference_module_is_independent():
    """It judges Octavo, so it may not call it: neither the operator nor the oracle."""
    text = Path(flashinfer_reference.__file__ or "").read_text()
    assert "octavo.api" not in text and "BatchAttention" not in text and "octavo.reference" not in text
    spec = AttentionSpec(2, 1, 32, dtype=FP32)
    q, k = torch.randn(2, 2, 32), torch.randn(3, 1, 1, 32)
    ids = torch.arange(3, dtype=I32)
    batch = PagedBatch.csr(torch.tensor([0, 2], dtype=I32), torch.tensor([0, 3], dtype=I32), ids)
    out = flashinfer_reference.single_prefill_with_kv_cache(q, k[:, 0], k[:, 0], causal=True)
    torch.testing.assert_close(out.double(), reference(spec, q, k, k, batch)[0], rtol=1e-5, atol=1e-6)
