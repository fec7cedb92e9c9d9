"""How batches would be scheduled on a GPU, and pictures of that for a report; none is needed here."""

from collections.abc import Iterator

import torch

from octavo.backends import BACKENDS
from octavo.bench.problems import parse_case, spec_from_json
from octavo.bench.results import Record
from octavo.bench.schedule_picture import schedule_chart
from octavo.bench.summary import Summary
from octavo.bench.workloads import Workload
from octavo.planning.form import DEFAULT_SPLIT, PlanForm, schedule_config
from octavo.planning.picture import H200_SMS, Machine, Picture, picture
from octavo.planning.schedule import SequenceShape, schedule
from octavo.problem import Arch, AttentionSpec, PagedBatch

DEVICE_BACKENDS = ("hopper", "triton")
"""Those that plan, in order of preference."""
MOST_SPANS = 2500
"""Items that a picture in a report may have."""
_KINDS = ("decode ", "..", "x")
"""What tells the names of cases worth a picture: decode, mixed lengths, several sequences; one of each."""


def draw(
    workload: Workload,
    spec: AttentionSpec,
    arch: Arch,
    machine: Machine,
    backend: str | None = None,
    batch_invariant: bool = False,
) -> tuple[str, PlanForm, Picture]:
    """(backend, form of the plan, the schedule at work) of one batch with its exact number of tokens.

    backend: one of DEVICE_BACKENDS; None takes the first that serves the spec.
    """
    name = backend or _preferred(spec, arch)
    planner = next(b for b in BACKENDS if b.name == name)
    form = planner.plan_form(spec, workload.num_tokens, _shapes_alone(workload, spec), arch, batch_invariant)
    assert form is not None
    items = schedule(spec, sequence_shapes(workload, spec), schedule_config(form, DEFAULT_SPLIT))
    return name, form, picture(spec, items, form, machine)


def _preferred(spec: AttentionSpec, arch: Arch) -> str:
    """The first that serves the spec. Where none can run, as without Triton, the portable one's plan is shown."""
    by_name = {b.name: b for b in BACKENDS}
    return next((n for n in DEVICE_BACKENDS if by_name[n].reject(spec, arch) is None), DEVICE_BACKENDS[-1])


def sequence_shapes(workload: Workload, spec: AttentionSpec) -> list[SequenceShape]:
    """The sequences, as the planner sees them, and the padding, of which there is none."""
    shapes, start, position = [], 0, 0
    for q_len, kv_len in zip(workload.qo_lens, workload.kv_lens, strict=True):
        shapes.append(SequenceShape(start, q_len, kv_len, position))
        start, position = start + q_len, position - (-kv_len // spec.page_size)
    return [*shapes, SequenceShape(start, 0, 0, 0)]


def _shapes_alone(workload: Workload, spec: AttentionSpec) -> PagedBatch:
    """The batch's tensors without contents: forms of plans follow from shapes."""
    pages = sum(-(-n // spec.page_size) for n in workload.kv_lens)
    indptr, ids, last = (
        torch.empty(n, dtype=torch.int32, device="meta")
        for n in (len(workload.qo_lens) + 1, pages, len(workload.qo_lens))
    )
    return PagedBatch.csr(indptr, indptr, ids, last)


def schedule_charts(summary: Summary) -> Iterator[tuple[str, str]]:
    """(title, SVG) of a few of a run's batches, as Octavo's planner orders them on the card that measured them."""
    shown: set[str] = set()
    ours = [case.records[summary.ours] for case in summary.cases if summary.ours in case.records]
    for kind in _KINDS:
        for record in ours:
            name = record["case"]
            if kind in name and name not in shown and record["sequences"] > 1 and record["source"] == "synthetic":
                chart = _chart_of(record)
                if chart is not None:
                    shown.add(name)
                    yield f"Schedule of {name}, predicted", chart
                    break


def _chart_of(record: Record) -> str | None:
    """None where a schedule is not known, or too long to be shown."""
    sms = record.get("sms") or (H200_SMS if "H200" in record["card"] else 0)
    if not sms or record.get("backend") not in DEVICE_BACKENDS:
        return None
    spec = spec_from_json(record["spec"])
    try:
        workload = parse_case(record["case"])
    except ValueError:
        return None  # a sweep's name says more than the batch
    ceilings = record["ceilings"]
    machine = Machine(sms, ceilings["tflops"] * 1e12, ceilings["gbps"] * 1e9)
    capability = (9, 0) if record["backend"] == "hopper" else (8, 0)
    _, _, seen = draw(workload, spec, Arch("cuda", capability, sms, record["card"]), machine, record["backend"])
    if not 0 < sum(len(one.spans) for one in seen.lists) <= MOST_SPANS:
        return None
    return schedule_chart(seen, record["case"])
