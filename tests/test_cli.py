"""The command line: what it prints, where it writes, and how it ends. Small inputs on the CPU."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from test_workloads import INDICES, ROW, write_trace
from typer.testing import CliRunner

import octavo
from octavo import AttentionSpec
from octavo.aot import CompiledReport, compile_build, parse_arch, read_sass, unmet
from octavo.backends import BACKENDS
from octavo.backends.catalog import KernelBuild
from octavo.bench.workloads import Workload, make_inputs
from octavo.cli import execute, jobs
from octavo.cli.app import app
from octavo.cli.check import check_case
from octavo.cli.contract import SPEC, Case, cases
from octavo.cli.targets import Skip, Target
from octavo.reference import reference

SMALL = ["--qo-heads", "4", "--kv-heads", "2", "--head-dim", "32", "--device", "cpu"]
LINES = '{"id": "one", "qo_lens": [3, 1], "kv_lens": [9, 4]}\n{"id": "two/dead", "qo_lens": [5], "kv_lens": [2]}\n'
CPU = torch.device("cpu")


@pytest.fixture
def cli(monkeypatch):
    """Runs the command line in this process; ceilings are measured on a small matrix and copy."""
    monkeypatch.setattr(execute, "MEASURE_S", 0.001)
    monkeypatch.setattr("octavo.bench.roofline._MATMUL_SIZE", {"cpu": 64, "cuda": 512})
    monkeypatch.setattr("octavo.bench.roofline._COPY_BYTES", {"cpu": 1 << 16, "cuda": 1 << 20})
    return lambda *arguments: CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "batches.jsonl"
    path.write_text(LINES)
    return path


def test_run_lines(cli, lines):
    result = cli("run", lines, *SMALL)
    assert result.exit_code == 0, result.output
    assert "one" in result.stdout and "two/dead" in result.stdout
    assert "all 2 batches right: 9 token rows compared (3 see no key)" in result.stdout
    assert "TFLOP/s" in result.stdout and "roofline" in result.stdout and "scaled down" not in result.stdout


@pytest.mark.parametrize(
    "options",
    [
        ["--page-size", "5", "--dtype", "fp32", "--contiguous"],
        ["--no-causal", "--dtype", "fp16", "--value-dim", "48"],
        ["--seed", "3", "--backend", "cpu", "--limit", "1"],
    ],
)
def test_run_options(cli, lines, options):
    result = cli("run", lines, *SMALL, *options)
    assert result.exit_code == 0, result.output
    assert ("two/dead" in result.stdout) == ("--limit" not in options)


def test_run_writes_what_it_computed(cli, lines, tmp_path):
    from safetensors.torch import load_file

    out = tmp_path / "results"
    assert cli("run", lines, lines, *SMALL, "--dtype", "fp32", "--out", out).exit_code == 0
    names = ["one-2.safetensors", "one.safetensors", "two-dead-2.safetensors", "two-dead.safetensors"]
    assert sorted(p.name for p in out.iterdir()) == names
    spec = AttentionSpec(4, 2, 32, dtype=torch.float32)
    p = make_inputs(Workload("two/dead", (5,), (2,)), spec, CPU)
    exact_out, exact_lse = reference(spec, p.q, p.kv.k_cache, p.kv.v_cache, p.batch)
    stored = load_file(out / "two-dead.safetensors")
    torch.testing.assert_close(stored["out"], exact_out.float())
    torch.testing.assert_close(stored["lse"], exact_lse.float())


def test_run_sample_scaled_down_says_so(cli, monkeypatch):
    monkeypatch.setattr(jobs, "CPU_SAMPLE_PAIRS", 500)
    monkeypatch.setattr(jobs, "CPU_SAMPLE_LENGTHS", 300)
    result = cli("run", *SMALL)
    assert result.exit_code == 0, result.output
    assert "azure_conv-01 *" in result.stdout and "of 13 batches are scaled down" in result.stdout
    assert "all 13 batches right" in result.stdout


def test_sample_is_whole_when_asked(tmp_path):
    options = jobs.JobOptions({}, None, 0, CPU)
    assert not any(job.scaled for job in jobs.load_jobs([], options)[0])
    bounded = jobs.load_jobs([], jobs.JobOptions({}, None, None, CPU))[0]
    assert all(job.workload.visible_pairs() < 3 * jobs.CPU_SAMPLE_PAIRS for job in bounded)
    on_gpu = jobs.load_jobs([], jobs.JobOptions({}, None, None, torch.device("cuda", 0)))[0]
    assert not any(job.scaled for job in on_gpu)


def test_run_wrong_row_ends_with_1(cli, lines, monkeypatch):
    run = octavo.BatchAttention.run

    def one_wrong(self, q, kv, *, out, lse, **options):
        run(self, q, kv, out=out, lse=lse, **options)
        out[0, 1].add_(1.0)

    monkeypatch.setattr(octavo.BatchAttention, "run", one_wrong)
    result = cli("run", lines, *SMALL)
    assert result.exit_code == 1
    assert "WRONG one: 1 of 4 rows wrong; row 0 (sequence 0, query 0, sees 7 keys): out off by" in result.stdout
    assert "2 of 2 batches WRONG" in result.stdout


def test_run_trace_folder(cli, tmp_path):
    write_trace(tmp_path / "trace", rows=[ROW, ROW | {"uuid": "fedcba98"}])
    from safetensors.torch import save_file

    save_file(INDICES, tmp_path / "trace" / "blob.safetensors")
    (tmp_path / "trace" / "definitions" / "gqa_paged" / "other.json").write_text('{"op_type": "moe"}')
    result = cli("run", tmp_path / "trace", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "fedcba98" in result.stdout and "all 2 batches right" in result.stdout
    assert "skipped 1 definitions" in result.stdout
    result = cli("run", tmp_path / "trace", "--page-size", "8", "--device", "cpu")
    assert result.exit_code == 2 and "expected no page_size" in result.stderr


WRONG_INPUTS = {
    "missing file": (["run", "nowhere.jsonl"], "nowhere.jsonl: expected a file or folder to use, got No such file"),
    "folder without a trace": (["run", "."], "expected a FlashInfer-Trace folder"),
    "dtype": (["run", "--dtype", "int8"], "--dtype: expected one of bf16, fp16, fp32, got 'int8'"),
    "device": (["run", "--device", "tpu"], "--device: expected auto, cpu, cuda or cuda:N, got 'tpu'"),
    "device index": (["run", "--device", "cuda:99"], "--device: expected a CUDA device below"),
    "heads": (
        ["run", "--qo-heads", "6", "--kv-heads", "4", "--device", "cpu"],
        "expected a multiple of num_kv_heads=4",
    ),
    "head dim": (["run", "--head-dim", "300", "--device", "cpu"], "head_dim: expected 16 to 256, got 300"),
    "page size": (["run", "--page-size", "0", "--device", "cpu"], "page_size: expected at least 1, got 0"),
    "backend": (["run", "--backend", "magic", "--device", "cpu"], "backend: expected one of"),
    "check backend": (["check", "--backend", "magic"], "--backend: expected one of"),
    "check case": (["check", "--only", "no such case"], "--only: expected part of a case's name"),
    "arch": (["compile", "--arch", "sm_75"], "--arch: expected sm_80 or newer"),
    "arch text": (["compile", "--arch", "hopper"], "--arch: expected sm_80 or newer"),
}


@pytest.mark.parametrize(("arguments", "said"), WRONG_INPUTS.values(), ids=WRONG_INPUTS)
def test_wrong_input_ends_with_2(cli, arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = cli(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr and "fix:" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1 and "Traceback" not in result.output


@pytest.mark.parametrize("text", ["", "{", '{"qo_lens": [1]}\n', "\xff"], ids=["empty", "json", "key", "bytes"])
def test_bad_lines_end_with_2(cli, tmp_path, text):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(text.encode("latin-1"))
    result = cli("run", path, *SMALL)
    assert result.exit_code == 2 and len(result.stderr.strip().splitlines()) == 1 and "fix:" in result.stderr


def test_out_of_memory_is_a_message(cli, lines, monkeypatch):
    def full(self, job):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(execute.Executor, "run", full)
    result = cli("run", lines, *SMALL)
    assert result.exit_code == 2 and "--max-pairs" in result.stderr


def test_check_passes_on_the_cpu(cli):
    result = cli("check", "--backend", "cpu", "--only", "scale")
    assert result.exit_code == 0, result.output
    assert "all 3 checks ok" in result.stdout and "cpu on cpu" in result.stdout


@pytest.mark.gpu
def test_run_and_check_on_a_gpu(cli, lines):
    for dtype in ("bf16", "fp16", "fp32"):
        result = cli("run", lines, "--dtype", dtype, "--page-size", "16")
        assert result.exit_code == 0, result.output
        assert "CUDA events" in result.stdout and "all 2 batches right" in result.stdout
    result = cli("check")
    assert result.exit_code == 0, result.output


def test_contract_has_its_parts():
    names = {case.name for case in cases()}
    parts = ("causal", "not causal", "rows that see no key", "block table", "append", "merge", "wrong input refused")
    assert set(parts) <= names and len(names) >= 35


WRONG_BACKENDS = {
    "raises": lambda call: 1 / 0,
    "writes nothing": lambda call: None,
    "NaN in dead rows": lambda call: (call.out.zero_(), call.lse.zero_()),
}


@pytest.mark.parametrize("attend", WRONG_BACKENDS.values(), ids=WRONG_BACKENDS)
def test_check_finds_wrong_backends(cli, monkeypatch, attend):
    monkeypatch.setattr("octavo.backends.cpu.CpuBackend.attend", lambda self, call: attend(call))
    result = cli("check", "--backend", "cpu", "--only", "causal")
    assert result.exit_code == 1
    assert "FAIL causal, cpu on cpu:" in result.stdout and "checks FAIL" in result.stdout


def test_check_says_what_is_not_served():
    def raises(target):
        raise Skip("needs a GPU")

    assert check_case(Case("x", raises), Target("cpu", CPU)) == ("skip", "needs a GPU")
    interpreted = Target("triton", CPU)
    assert interpreted.interpreted and "interpreted" in str(interpreted)
    with pytest.raises(Skip):
        interpreted.fit(SPEC, exact=True)


def test_info(cli):
    result = cli("info")
    assert result.exit_code == 0
    for said in (octavo.__version__, torch.__version__, "backends on cpu", "first in order of preference"):
        assert said in result.stdout
    for backend in BACKENDS:
        assert re.search(rf"^\W*{backend.name}\s", result.stdout, re.MULTILINE)
    assert "needs compute capability 9.0" in " ".join(result.stdout.replace("│", " ").split())


@pytest.mark.parametrize("command", [[], ["run"], ["check"], ["info"], ["compile"]])
def test_help(cli, command):
    result = cli(*command, "--help")
    assert result.exit_code == 0 and "Usage: " in result.stdout


def test_version(cli):
    assert cli("--version").stdout == f"octavo {octavo.__version__}\n"


def fresh(code, **environment):
    """Run Python code in a fresh process."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, timeout=120
    )


def test_without_typer_says_what_to_install():
    code = "import sys; sys.modules['typer'] = None; from octavo.cli.main import main; main()"
    result = fresh(code)
    assert result.returncode == 2 and "pip install 'octavo[cli]'" in result.stderr and "Traceback" not in result.stderr


def test_info_needs_no_triton():
    code = """
import sys, importlib.util
sys.modules['triton'] = None
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == 'triton' else find(name, *rest)
sys.argv = ['octavo', 'info']
from octavo.cli.main import main
main()
"""
    result = fresh(code)
    assert result.returncode == 0, result.stderr
    assert "backends on cpu" in result.stdout


def test_compile_one_kernel_without_a_gpu():
    """In its own process, because a test run under Triton's interpreter must compile too."""
    command = [sys.executable, "-m", "octavo", "compile", "--arch", "sm_90", "--kernel", "merge", "--json"]
    pytest.importorskip("triton")
    result = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"}, timeout=240
    )
    assert result.returncode == 0, result.stderr
    (report,) = json.loads(result.stdout)
    assert report["sm"] == 90 and report["registers"] > 0 and report["ok"] and report["failures"] == []


def report_of(**more):
    return CompiledReport("kernel", 90, 128, 0, 1024, {"HGMMA": 4}, **more)


def test_compile_table_and_exit_code(cli, monkeypatch):
    pytest.importorskip("triton")
    bad = report_of(failures=("expected LDGSTS instructions, got none",))
    monkeypatch.setattr("octavo.cli.compile.compile_all", lambda sms, kernel: iter([2, report_of(), bad]))
    result = cli("compile")
    assert result.exit_code == 1
    assert "HGMMA 4" in result.stdout and "FAIL sm_90 kernel: expected LDGSTS" in result.stdout
    monkeypatch.setattr("octavo.cli.compile.compile_all", lambda sms, kernel: iter([1, report_of()]))
    assert cli("compile").exit_code == 0
    monkeypatch.setattr("octavo.cli.compile.compile_all", lambda sms, kernel: iter([0]))
    assert cli("compile", "--kernel", "nothing").exit_code == 2


SASS = """
\t.section\t.text.kernel,"ax",@progbits
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDGSTS.E.BYPASS.128 [R5], [R2.64] ;
        /*0020*/              @P1  HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*0030*/             @!UP0 UTMALDG.2D [UR4], [UR6] ;
        /*0040*/                   STL.64 [R1+0x8], R4 ;
        /*0050*/                   LDL R4, [R1+0x8] ;
        /*0060*/             @!PT  LDS.128 R4, [R8] ;
"""


def test_sass_is_read():
    counts, spills = read_sass(SASS)
    assert counts == {"LDC": 1, "LDGSTS": 1, "HGMMA": 1, "UTMALDG": 1, "STL": 1, "LDL": 1, "LDS": 1}
    assert spills == 12
    with pytest.raises(RuntimeError, match="expected instructions"):
        read_sass("nothing here")


def test_expectations_are_held():
    build = KernelBuild("k", None, {}, {}, {}, expect=("HGMMA", "LDGSTS"), max_spills=8)
    counts, spills = read_sass(SASS)
    assert unmet(build, counts, 8) == ()
    assert unmet(build, counts, spills) == ("expected at most 8 bytes of spills, got 12",)
    del counts["LDGSTS"]
    assert unmet(build, counts, 0) == ("expected LDGSTS instructions, got none",)


def test_arch_names():
    assert parse_arch("sm_90") == 90 and parse_arch("sm_120") == 120
    with pytest.raises(ValueError, match="fix:"):
        parse_arch("90")


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted in this process")
def test_broken_kernel_is_a_report():
    triton = pytest.importorskip("triton")

    @triton.jit
    def broken(x):
        return undefined_name

    report = compile_build(KernelBuild("broken", broken, {"x": "*fp32"}, {}, {}), 90)
    assert not report.ok and report.failures[0].startswith("does not compile: ")
