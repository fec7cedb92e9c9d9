"""Run one batch: inputs, plan and run, verification, timing."""

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from octavo.api import BatchAttention
from octavo.bench.measure import clock_for
from octavo.bench.roofline import Ceilings, measure_ceilings, median_seconds
from octavo.bench.sampling import sample_rows
from octavo.bench.verify import Verdict, verify_rows
from octavo.cli.jobs import Job
from octavo.shapes import Tensor

MEASURE_S = 0.3
VERIFY = {"cpu": {"max_rows": 32, "max_keys": 100_000}, "cuda": {"max_rows": 48, "max_keys": 300_000}}


@dataclass(frozen=True)
class Result:
    """One batch, computed."""

    job: Job
    backend: str
    seconds: float
    verdict: Verdict
    roofline_share: float

    @property
    def tflops(self) -> float:
        return self.job.workload.flops(self.job.spec) / self.seconds / 1e12

    @property
    def gbytes_per_s(self) -> float:
        return self.job.workload.bytes(self.job.spec) / self.seconds / 1e9


class Executor:
    """Runs jobs on one device. Measures the machine's ceilings once per dtype."""

    def __init__(self, device: torch.device, backend: str | None, seed: int, out: Path | None) -> None:
        self.device, self.backend, self.seed, self.out = device, backend, seed, out
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self.clock = clock_for(device)
        self.ceilings: dict[torch.dtype, Ceilings] = {}
        self.written: set[Path] = set()

    def ceilings_of(self, dtype: torch.dtype) -> Ceilings:
        if dtype not in self.ceilings:
            self.ceilings[dtype] = measure_ceilings(self.device, dtype)
        return self.ceilings[dtype]

    @torch.no_grad()
    def run(self, job: Job) -> Result:
        """Compute, verify and time one batch; its outputs are NaN before the first call."""
        ceilings = self.ceilings_of(job.spec.dtype)
        inputs = job.make_inputs(self.device, self.seed)
        tokens, heads = inputs.q.shape[:2]
        out = torch.full((tokens, heads, job.spec.v_dim), torch.nan, dtype=job.spec.dtype, device=self.device)
        lse = torch.full((tokens, heads), torch.nan, device=self.device)
        attention = BatchAttention(job.spec, device=self.device, backend=self.backend)

        def plan_and_run() -> None:
            attention.plan(inputs.batch, num_tokens=tokens)
            attention.run(inputs.q, inputs.kv, sm_scale=job.sm_scale, out=out, lse=lse)

        plan_and_run()
        rows = sample_rows(job.spec, inputs.batch, tokens, **VERIFY[self.device.type], seed=self.seed)
        verdict = verify_rows(job.spec, inputs.q, inputs.kv, inputs.batch, out, lse, rows, job.sm_scale)
        if self.out is not None:
            self._save(job, out, lse)
        seconds = median_seconds(plan_and_run, self.clock, MEASURE_S)
        share = ceilings.bound_s(job.workload, job.spec) / seconds
        return Result(job, attention.choice.backend.name, seconds, verdict, share)

    def _save(self, job: Job, out: Tensor, lse: Tensor) -> None:
        from safetensors.torch import save_file

        assert self.out is not None
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", job.workload.name)
        path, n = self.out / f"{stem}.safetensors", 1
        while path in self.written:
            n += 1
            path = self.out / f"{stem}-{n}.safetensors"
        self.written.add(path)
        metadata = {
            "batch": job.workload.name,
            "source": job.workload.source,
            "spec": str(job.spec),
            "seed": str(self.seed),
        }
        save_file({"out": out.cpu().contiguous(), "lse": lse.cpu().contiguous()}, path, metadata)
