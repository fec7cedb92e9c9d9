"""`octavo export`: sources put together from Octavo's own, run in Triton's interpreter, and built by the tool."""

import ast
import importlib
import json
import math
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from octavo.bench.sampling import sample_rows
from octavo.bench.verify import verify_rows
from octavo.bench.workloads import Workload, make_inputs
from octavo.cli.app import app
from octavo.integrations import inline_source
from octavo.integrations.flashinfer_bench import DEFINITIONS, KERNEL, RAGGED, Definition, export, solution, source

pytest.importorskip("triton")

TESTS = Path(__file__).parent
SMALL = (
    "gqa_paged_prefill_causal_h4_kv2_d32_ps4",
    "gqa_paged_decode_h4_kv1_d16_ps1",
    "gqa_ragged_prefill_causal_h3_kv1_d32",
)

_RUN = """
    import importlib, sys, torch
    from interpreting import speed_up
    from octavo.bench.verify import verify_rows
    from octavo.bench.workloads import Workload, make_inputs
    from octavo.kv_cache import PagedKV
    from octavo.problem import AttentionSpec, PagedBatch

    def check(name, heads, kv_heads, dim, page, qo_lens, kv_lens, kind, scale):
        '''Both calling styles against the oracle; the module has no Octavo.'''
        main = importlib.import_module(name)
        spec = AttentionSpec(heads, kv_heads, dim, page_size=page, dtype=torch.float16)
        x = make_inputs(Workload("w", qo_lens, kv_lens), spec, "cpu")
        k, v, b = x.kv.k_cache, x.kv.v_cache, x.batch
        if kind == "ragged":
            k, v = (c[b.page_table.long(), 0] for c in (k, v))
            x = x.__class__(spec, x.q, PagedKV(k[:, None], v[:, None]), PagedBatch.csr(
                b.qo_indptr, b.kv_indptr, torch.arange(len(k), dtype=torch.int32), b.last_page_len))
            tensors = (x.q, k, v, b.qo_indptr, b.kv_indptr)
        elif kind == "decode":
            tensors = (x.q, k, v, b.kv_indptr, b.page_table)
        else:
            tensors = (x.q, k, v, b.qo_indptr, b.kv_indptr, b.page_table, b.last_page_len)
        out, lse = torch.full_like(x.q, float("nan")), torch.full(x.q.shape[:2], float("nan"))
        main.run(*tensors, scale, out, lse)
        returned = main.run(*tensors, torch.tensor(scale))
        for got_out, got_lse in ((out, lse), returned):
            assert torch.isfinite(got_lse).all()
            got_lse = torch.where(got_lse < -1e38, float("-inf"), got_lse)
            verdict = verify_rows(spec, x.q, x.kv, x.batch, got_out, got_lse, range(len(x.q)), scale)
            assert verdict.ok, verdict.message
        print(name, "dead rows", verdict.dead_rows)

    speed_up()
    sys.path.insert(0, sys.argv[1])
    check("m0", 4, 2, 32, 4, (5, 3, 20), (9, 2, 150), "prefill", 0.2)
    check("m1", 4, 1, 16, 1, (1, 1, 1), (600, 0, 7), "decode", -0.1)
    check("m1", 4, 1, 16, 1, (1,) * 140, (3,) * 139 + (0,), "decode", 0.5)  # more than the kernel's usual 127
    check("m2", 3, 1, 32, 1, (7, 1), (6, 30), "ragged", 0.3)
"""


def test_sources_compute_attention_by_themselves(tmp_path: Path) -> None:
    """In a process of its own, as the interpreter is chosen when Triton is imported."""
    for number, name in enumerate(SMALL):
        text = source(Definition.parse(name))
        assert "octavo" not in {n.split(".")[0] for n in _imports(text)}
        (tmp_path / f"m{number}.py").write_text(text)
    command = [sys.executable, "-c", textwrap.dedent(_RUN), str(tmp_path)]
    environment = {"TRITON_INTERPRET": "1", "PATH": "", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=TESTS, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "m0 dead rows 1" in done.stdout and "m1 dead rows 1" in done.stdout and "m2 dead rows 1" in done.stdout


_ON_GPU = {
    "gqa_paged_prefill_causal_h32_kv4_d128_ps1": ((512, 30, 1, 7), (4096, 30, 20000, 3)),
    "gqa_paged_prefill_causal_h32_kv8_d128_ps64": ((100, 5), (1000, 70)),
    "gqa_paged_decode_h32_kv4_d128_ps1": ((1,) * 200, (1, 0, *range(100, 20000, 101), 5)[:200]),
    "gqa_ragged_prefill_causal_h32_kv8_d128": ((300, 50), (300, 700)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", _ON_GPU)
def test_solutions_on_a_gpu_are_right_and_one_kernel(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    d = Definition.parse(name)
    (tmp_path / f"{name}.py").write_text(source(d))
    monkeypatch.syspath_prepend(str(tmp_path))
    run = importlib.import_module(name).run
    x = make_inputs(Workload("w", *_ON_GPU[name]), d.spec, "cuda", scattered=d.kind != RAGGED)
    k, v, b = x.kv.k_cache, x.kv.v_cache, x.batch
    assert b.kv_indptr is not None
    if d.kind == RAGGED:
        total = len(b.page_table)
        k, v = k[:total, 0], v[:total, 0]
    known: dict[str, object] = {
        "q": x.q,
        "k": k,
        "v": v,
        "k_cache": k,
        "v_cache": v,
        "qo_indptr": b.qo_indptr,
        "kv_indptr": b.kv_indptr,
    }
    known |= {"kv_indices": b.page_table, "kv_last_page_len": b.last_page_len, "sm_scale": d.spec.default_scale}
    arguments = [known[argument] for argument in d.inputs]
    run(*arguments)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        out, lse = run(*arguments)
        torch.cuda.synchronize()
    assert [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA] == [KERNEL]
    assert torch.isfinite(lse).all()
    lse = torch.where(lse < -1e38, -math.inf, lse)
    rows = sample_rows(d.spec, b, len(x.q))
    verdict = verify_rows(d.spec, x.q, x.kv, b, out, lse, rows)
    assert verdict.ok, verdict.message


def _imports(text: str) -> list[str]:
    nodes = ast.walk(ast.parse(text))
    found = [[n.module or ""] if isinstance(n, ast.ImportFrom) else [a.name for a in n.names]
             for n in nodes if isinstance(n, ast.Import | ast.ImportFrom)]  # fmt: skip
    return [name for names in found for name in names]


def test_a_source_has_what_its_kernel_needs_and_nothing_else() -> None:
    text = source(Definition.parse("gqa_paged_decode_h32_kv8_d128_ps1"))
    defined = {node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    assert {KERNEL, "run", "find_item", "combine_states"} <= defined
    assert not {"plan_kernel", "attention_kernel", "find_sequence"} & defined
    assert "@" not in text.replace("@triton.jit", "")
    assert text.count("propagate_nan") == 1


def test_every_definition_of_the_public_set(tmp_path: Path) -> None:
    written = export(tmp_path)
    assert len(written) == len(set(DEFINITIONS)) == len(DEFINITIONS)
    for path in written:
        made = json.loads(path.read_text())
        assert path.parts[-2] == made["definition"] and path.parts[-3] in ("gqa_paged", "gqa_ragged")
        compile(made["sources"][0]["content"], "main.py", "exec")
        assert made["spec"]["entry_point"] == "main.py::run" and "-inf" in made["description"]


_OTHERS = ("gemm_n128_k2048", "gqa_paged_decode_h32_kv8_d128", "gqa_ragged_prefill_causal_h32_kv8_d128_ps1")


@pytest.mark.parametrize("name", _OTHERS)
def test_other_definitions_are_refused(name: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["export", "flashinfer-bench", str(tmp_path), "--definition", name])
    assert done.exit_code == 2 and "fix:" in done.output and not list(tmp_path.iterdir())


def test_command(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["export", "flashinfer-bench", str(tmp_path), "--definition", SMALL[0]])
    assert done.exit_code == 0, done.output
    assert len(list(tmp_path.rglob("*.json"))) == 1
    assert CliRunner().invoke(app, ["export", "nothing", str(tmp_path)]).exit_code == 2


def test_inlining_keeps_names_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inlined_a.py").write_text("import os\n\nX = 1\n# Why Y.\nY = X + Z\nUNUSED = os\n")
    (tmp_path / "inlined_b.py").write_text("from inlined_a import Y\n\n\ndef f():\n    return Y\n")
    (tmp_path / "inlined_c.py").write_text("X = 2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    text = inline_source.inline(["inlined_a", "inlined_b"], ["f"], {"Z": "Z = 5"})
    scope: dict[str, object] = {}
    exec(text, scope)
    assert scope["f"]() == 6 and "UNUSED" not in text and "# Why Y." in text  # type: ignore[operator]
    with pytest.raises(ValueError, match="two"):
        inline_source.inline(["inlined_a", "inlined_c"], ["X"], {})
    with pytest.raises(ValueError, match="found none"):
        inline_source.inline(["inlined_a"], ["nothing"], {})


def _definition(name: str) -> dict[str, object]:
    """A definition as the public set has it, with a reference of the right shapes."""
    d = Definition.parse(name)
    heads, page = ["num_qo_heads", "head_dim"], d.spec.page_size
    cache = ["num_pages", "page_size", "num_kv_heads", "head_dim"]
    constants = {"num_qo_heads": d.spec.num_qo_heads, "num_kv_heads": d.spec.num_kv_heads, "head_dim": d.spec.head_dim}
    axes: dict[str, object] = {n: {"type": "const", "value": v} for n, v in {**constants, "page_size": page}.items()}
    axes |= {n: {"type": "var"} for n in ("batch_size", "num_pages", "len_indptr", "num_kv_indices")}
    return {
        "name": name,
        "op_type": d.op_type,
        "axes": axes,
        "inputs": {
            "q": {"shape": ["batch_size", *heads], "dtype": "float16"},
            "k_cache": {"shape": cache, "dtype": "float16"},
            "v_cache": {"shape": cache, "dtype": "float16"},
            "kv_indptr": {"shape": ["len_indptr"], "dtype": "int32"},
            "kv_indices": {"shape": ["num_kv_indices"], "dtype": "int32"},
            "sm_scale": {"shape": None, "dtype": "float32"},
        },
        "outputs": {
            "output": {"shape": ["batch_size", *heads], "dtype": "float16"},
            "lse": {"shape": ["batch_size", "num_qo_heads"], "dtype": "float32"},
        },
        "reference": "def run(q, k_cache, v_cache, kv_indptr, kv_indices, sm_scale):\n    return q, q[..., 0]\n",
    }


def test_the_tool_builds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer-Bench's own data model and builder; what it runs is checked above."""
    monkeypatch.setenv("FIB_CACHE_PATH", str(tmp_path))
    tool = pytest.importorskip("flashinfer_bench", reason="needs flashinfer-bench")
    builders = importlib.import_module("flashinfer_bench.compile").BuilderRegistry.get_instance()
    name = SMALL[1]
    made = tool.Solution.model_validate(solution(Definition.parse(name)))
    definition = tool.Definition.model_validate(_definition(name))
    runnable = builders.build(definition, made)
    empty = torch.empty(0, 4, 16, dtype=torch.float16), torch.empty(8, 1, 1, 16, dtype=torch.float16)
    offsets = torch.zeros(1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    arguments = (empty[0], empty[1], empty[1], *offsets, 1 / math.sqrt(16))
    out, lse = runnable.call_value_returning(*arguments)
    assert out.shape == (0, 4, 16) and lse.shape == (0, 4) and lse.dtype == torch.float32
    trace_set = tool.TraceSet.from_path(str(_trace_set(tmp_path / "set", name)))
    assert [s.name for s in trace_set.solutions[name]] == [f"octavo_{name}"]


def _trace_set(folder: Path, name: str) -> Path:
    path = folder / "definitions" / "gqa_paged" / f"{name}.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(_definition(name)))
    export(folder, (name,))
    return folder
