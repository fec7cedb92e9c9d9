"""octavo under PyTorch's tracing: opcheck of every operator, torch.compile(fullgraph=True) against eager."""

import inspect

import pytest
import torch
from inputs import FP16, FP32, Case, build
from targets import Target

import octavo
from octavo import BatchAttention, PagedBatch, PagedKV, ops
from octavo.backends import arch_of

COMPILERS = ("eager", "aot_eager")
CASES = {
    "csr": Case("csr", page_size=2, dtype=FP32),
    "dense": Case("dense", page_size=4, dense=True, dtype=FP16),
    "dead rows": Case("dead", (5, 3), (2, 0), padding=2, dtype=FP32),
    "value dim": Case("value dim", dims=(64, 32), heads=(6, 2), causal=False, dtype=FP32),
}


@pytest.fixture
def target(backend) -> Target:
    if backend.interpreted:
        pytest.skip("tracing does not reach kernels: the compiled backends show all there is to see")
    return backend


@pytest.fixture(autouse=True)
def traceable(monkeypatch):
    """Dynamo cannot trace jaxtyping's checks, so the functions that it inlines are the plain ones here."""
    for name in ("pack_batch", "is_traced"):
        monkeypatch.setattr(ops, name, inspect.unwrap(getattr(ops, name)))
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def attention_inputs(problem):
    kv, batch = problem.kv, ops.pack_batch(problem.batch)
    return (problem.q, kv.k_cache, kv.v_cache, batch, None, None, problem.spec.default_scale)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_opcheck_attention(target, case):
    problem = target.build(case)
    options = {"causal": case.causal, "backend": target.name}
    torch.library.opcheck(torch.ops.octavo.attention.default, attention_inputs(problem), options)


def test_opcheck_attention_with_a_scale_tensor(target):
    problem = target.build(CASES["csr"])
    scale = torch.tensor(0.1, device=target.device)
    inputs = (*attention_inputs(problem)[:5], scale, 1.0)
    torch.library.opcheck(torch.ops.octavo.attention.default, inputs, {"backend": target.name})


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_opcheck_attention_out(target, case):
    problem = target.build(case)
    rows, heads = problem.q.shape[:2]
    buffers = {
        "out": torch.empty(rows, heads, case.dims[1], dtype=case.dtype, device=target.device),
        "lse": torch.empty(rows, heads, device=target.device),
    }
    options = {"causal": case.causal, "backend": target.name, **buffers}
    torch.library.opcheck(torch.ops.octavo.attention_out.default, attention_inputs(problem), options)


@pytest.mark.parametrize("dense", (False, True), ids=("csr", "dense"))
def test_opcheck_append(target, dense):
    problem = target.build(Case("append", page_size=4, dense=dense, padding=0, dtype=FP32))
    # Poison would compare unequal to itself.
    caches = [torch.zeros_like(x) for x in (problem.kv.k_cache, problem.kv.v_cache)]
    k = torch.randn(problem.q.shape[0], 2, 64, device=target.device)
    batch = ops.pack_batch(problem.batch)
    torch.library.opcheck(torch.ops.octavo.append.default, (k, k + 1, *caches, batch))


@pytest.mark.parametrize("count", (1, 3))
def test_opcheck_merge(target, count):
    outs = [torch.randn(5, 4, 32, device=target.device) for _ in range(count)]
    lses = [torch.randn(5, 4, device=target.device) for _ in range(count)]
    torch.library.opcheck(torch.ops.octavo.merge.default, (outs, lses))


@pytest.mark.gpu
def test_opcheck_plan():
    problem = build(Case("plan", page_size=2), "cuda")
    attention = BatchAttention(problem.spec, device="cuda", backend="triton")
    attention.plan(problem.batch, num_tokens=problem.q.shape[0])
    spec = problem.spec
    backend, arch = attention.choice.backend, arch_of(attention.device)
    form = backend.plan_form(spec, problem.q.shape[0], problem.batch, arch)
    words = backend.plan_words(spec, problem.q.shape[0], problem.batch.num_sequences, form)
    options = {
        "shape": [spec.num_qo_heads, spec.num_kv_heads, spec.head_dim, spec.v_dim, spec.page_size],
        "dtype": spec.dtype,
        "causal": spec.causal,
        "backend": "triton",
        "form": form,
    }
    plan = torch.zeros(words, dtype=torch.int32, device="cuda")
    inputs = (ops.pack_batch(problem.batch), plan, problem.q.shape[0])
    torch.library.opcheck(torch.ops.octavo.plan.default, inputs, options)


def assert_equal(got, expected):
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_compiled_attend_is_eager(target, compiler, case):
    problem = target.build(case)

    def layer(q, k_cache, v_cache, batch):
        kv = PagedKV(k_cache, v_cache)
        out, lse = octavo.attend(2 * q, kv, batch, causal=case.causal, backend=target.name)
        return out + 1, lse

    inputs = (problem.q, problem.kv.k_cache, problem.kv.v_cache, problem.batch)
    assert_equal(torch.compile(layer, fullgraph=True, backend=compiler)(*inputs), layer(*inputs))


@pytest.mark.parametrize("compiler", COMPILERS)
def test_compiled_run_is_eager(target, compiler):
    problem = target.build(CASES["csr"])
    b = problem.batch

    def layer(q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, last_page_len):
        batch = (qo_indptr, kv_indptr, kv_indices)
        return octavo.run(q, k_cache, v_cache, *batch, sm_scale=0.2, last_page_len=last_page_len)

    inputs = (problem.q, problem.kv.k_cache, problem.kv.v_cache, b.qo_indptr, b.kv_indptr, b.page_table)
    inputs += (b.last_page_len,)
    assert_equal(torch.compile(layer, fullgraph=True, backend=compiler)(*inputs), layer(*inputs))


@pytest.mark.parametrize("compiler", COMPILERS)
def test_compiled_plan_run_is_eager(target, compiler):
    """The plan is made outside, as an engine does, and every compiled layer uses it."""
    problem = target.build(CASES["dense"])
    attention = target.plan(problem)

    def layer(q, k_cache, v_cache):
        out, lse = attention.run(q * 0.5, PagedKV(k_cache, v_cache))
        return out * 2, lse

    inputs = (problem.q, problem.kv.k_cache, problem.kv.v_cache)
    assert_equal(torch.compile(layer, fullgraph=True, backend=compiler)(*inputs), layer(*inputs))


@pytest.mark.parametrize("compiler", COMPILERS)
def test_compiled_run_into_buffers_is_eager(target, compiler):
    problem = target.build(CASES["csr"])
    attention = target.plan(problem)
    rows = problem.q.shape[0]

    def layer(q, k_cache, v_cache, out, lse):
        attention.run(q, PagedKV(k_cache, v_cache), out=out, lse=lse)
        return out * 2

    def buffers():
        return torch.empty(rows, 4, 64, device=target.device), torch.empty(rows, 4, device=target.device)

    inputs = (problem.q, problem.kv.k_cache, problem.kv.v_cache)
    (out, lse), (eager_out, eager_lse) = buffers(), buffers()
    doubled = torch.compile(layer, fullgraph=True, backend=compiler)(*inputs, out, lse)
    assert_equal((doubled, out, lse), (layer(*inputs, eager_out, eager_lse), eager_out, eager_lse))


@pytest.mark.parametrize("compiler", (*COMPILERS, "inductor"))
def test_compiled_append_then_attend_is_eager(target, compiler):
    """The write must not move past the read, nor vanish. Without arithmetic, inductor has no kernel to compile."""
    problem = target.build(Case("append", page_size=4, dtype=FP32, padding=0))
    generator = torch.Generator().manual_seed(3)
    k, v = (torch.randn(problem.q.shape[0], 2, 64, generator=generator).to(target.device) for _ in range(2))

    def layer(q, k, v, k_cache, v_cache, batch: PagedBatch):
        kv = PagedKV(k_cache, v_cache)
        octavo.append(k, v, kv, batch)
        return octavo.attend(q, kv, batch, backend=target.name)

    def caches():
        return problem.kv.k_cache.nan_to_num(0).clone(), problem.kv.v_cache.nan_to_num(0).clone()

    compiled_caches, eager_caches = caches(), caches()
    compiled = torch.compile(layer, fullgraph=True, backend=compiler)(problem.q, k, v, *compiled_caches, problem.batch)
    assert_equal(compiled, layer(problem.q, k, v, *eager_caches, problem.batch))
    assert_equal(compiled_caches, eager_caches)


@pytest.mark.parametrize("compiler", COMPILERS)
def test_compiled_merge_is_eager(target, compiler):
    states = [(torch.randn(6, 4, 32, device=target.device), torch.randn(6, 4, device=target.device)) for _ in range(3)]

    def join(states):
        out, lse = octavo.merge([(out * 3, lse) for out, lse in states])
        return out - 1, lse

    assert_equal(torch.compile(join, fullgraph=True, backend=compiler)(states), join(states))


def test_one_graph_serves_all_lengths(target):
    """Dynamic token counts: no recompilation, the right numbers."""
    compiled = torch.compile(
        lambda q, kv, batch: octavo.attend(q, kv, batch, backend=target.name),
        fullgraph=True,
        backend="aot_eager",
        dynamic=True,
    )
    for tokens in (4, 7, 13):
        problem = target.build(Case("dynamic", (tokens, 2), (tokens + 3, 9), dtype=FP32, padding=0))
        with torch._dynamo.config.patch(error_on_recompile=tokens > 7):
            assert_equal(compiled(problem.q, problem.kv, problem.batch), target.attend(problem))


def test_compiled_wrong_shape_still_raises(target):
    problem = target.build(CASES["csr"])
    compiled = torch.compile(lambda q: octavo.attend(q, problem.kv, problem.batch), backend="eager")
    with pytest.raises(ValueError, match="k_cache: expected"):
        compiled(torch.cat([problem.q, problem.q], -1))
