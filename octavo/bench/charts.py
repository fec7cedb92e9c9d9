"""The report's pictures: speed against Octavo's per batch, the roofline, time against size."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from octavo.bench.results import Record
from octavo.bench.summary import Case, Summary
from octavo.bench.svg import INK, Canvas, LogScale, Marker, Plot, compact, legend

WIDTH = 480
_MARKERS = {
    "octavo": Marker("#d55e00", "circle", 5.5),
    "octavo-triton": Marker("#d55e00", "ring", 4.5),
    "flashinfer-fa2": Marker("#0072b2", "square", 4),
    "flashinfer-fa3": Marker("#0072b2", "triangle"),
    "flashinfer-decode": Marker("#0072b2", "diamond", 4),
    "fa4": Marker("#009e73", "triangle"),
    "fa3-dense": Marker("#009e73", "plus"),
    "torch-varlen": Marker("#b0436e", "square", 4),
    "flex": Marker("#b0436e", "plus"),
    "sdpa-cudnn": Marker("#8a6d00", "wedge"),
    "sdpa-flash": Marker("#8a6d00", "plus"),
    "sdpa-gather": Marker("#0072b2", "square", 4),
    "seed": Marker("#6b7280", "cross", 3.5),
}
_OTHERS = (Marker("#7b3294", "diamond", 4), Marker("#7b3294", "wedge"), Marker("#7b3294", "plus"))
_SLOWEST_SHOWN, _FASTEST_SHOWN = 0.25, 2.5


def markers(labels: Sequence[str]) -> dict[str, Marker]:
    """One marker per label; labels unknown here take from a few spare ones in turn."""
    unknown = [label for label in labels if label not in _MARKERS]
    spare = {label: _OTHERS[i % len(_OTHERS)] for i, label in enumerate(unknown)}
    return {label: spare.get(label) or _MARKERS[label] for label in labels}


def speed_chart(summary: Summary) -> str:
    """A row per case: each implementation's speed as a multiple of Octavo's, which is the line at 1."""
    ours, marks = summary.ours, markers(summary.labels)
    cases = [case for case in summary.cases if case.us(ours)]
    canvas = Canvas(WIDTH, 0, f"Speed of each implementation as a multiple of {ours}'s, per batch")
    left = 14 + min(170.0, 6.3 * max((len(_clipped(case.name)) for case in cases), default=0))
    top = legend(canvas, list(marks.items()), 8, 18, WIDTH - 8) + 14
    bottom = top + 24 * len(cases)
    ratios = [r for case in cases for label in case.records if (r := case.speed_of(label, ours))]
    x = LogScale(max(_SLOWEST_SHOWN, min(ratios) / 1.1), min(_FASTEST_SHOWN, max(*ratios, 1.0) * 1.2), left, WIDTH - 22)
    for tick in x.ticks():
        canvas.line(x(tick), top - 4, x(tick), bottom)
        canvas.text(x(tick), top - 8, f"{compact(tick)}x", "middle", 10)
    canvas.line(x(1), top - 4, x(1), bottom, INK, 1.5)
    for row, case in enumerate(cases):
        y = top + 24 * row + 12
        canvas.text(left - 8, y + 4, _clipped(case.name), "end")
        _speed_row(canvas, x, y, case, ours, marks)
    canvas.text((x.start + x.end) / 2, bottom + 16, f"speed as a multiple of {ours}'s (right is faster)", "middle")
    canvas.height = bottom + 26
    return canvas.render()


def _speed_row(canvas: Canvas, x: LogScale, y: float, case: Case, ours: str, marks: dict[str, Marker]) -> None:
    """Octavo's marker on top. Those off the scale stand at its end one beside the other, their ratios written out."""
    slow = fast = 0
    for label in sorted(case.timed(), key=lambda label: (label == ours, -(case.us(label) or 0))):
        ratio = case.speed_of(label, ours) or 1.0
        tip = _tip(case, label)
        if ratio < x.low:
            canvas.mark(x.start + 6 + 46 * slow, y, marks[label], tip)
            canvas.text(x.start + 13 + 46 * slow, y + 4, f"{ratio:.1g}x", size=9)
            slow += 1
        elif ratio > x.high:
            canvas.mark(x.end - 46 * fast, y, marks[label], tip)
            canvas.text(x.end - 7 - 46 * fast, y + 4, f"{ratio:.2g}x", "end", 9)
            fast += 1
        else:
            canvas.mark(x(ratio), y, marks[label], tip)


def _clipped(name: str) -> str:
    return name if len(name) <= 26 else f"{name[:12]}...{name[-11:]}"


def _tip(case: Case, label: str) -> str:
    record = case.records[label]
    return f"{case.name}, {label}: {record['us']:,.1f} us, {case.rate(label)}"


def roofline_chart(summary: Summary) -> str | None:
    """Reached TFLOP/s against FLOP per byte, under the measured ceilings; None where there is nothing to show."""
    marks = markers(summary.labels)
    shown = [case for case in summary.cases if case.flops >= case.bytes and case.timed()]
    if not shown:
        return None
    ceilings = summary.records[0]["ceilings"]
    peak, bandwidth = ceilings["tflops"], ceilings["gbps"] / 1e3
    reached = [record["tflops"] for case in shown for record in case.timed().values()]
    intensities = [case.flops / case.bytes for case in shown]
    canvas = Canvas(WIDTH, 0, "Reached TFLOP/s against FLOP per byte, under the measured ceilings")
    top = legend(canvas, list(marks.items()), 8, 18, WIDTH - 8) + 16
    canvas.height = top + 290
    x = LogScale.around([*intensities, peak / bandwidth], 44, WIDTH - 14)
    plot = Plot(canvas, x, LogScale.around([*reached, peak], top + 250, top))
    plot.axes("FLOP per byte of least memory traffic", "TFLOP/s")
    _roof(plot, peak, bandwidth)
    for case in shown:
        for label, record in case.timed().items():
            canvas.mark(x(case.flops / case.bytes), plot.y(record["tflops"]), marks[label], _tip(case, label))
    return canvas.render()


def _roof(plot: Plot, peak: float, bandwidth: float) -> None:
    ridge = peak / bandwidth
    # Bandwidth's line enters at the left edge or, where it is below the plot there, at the bottom edge.
    start = max(plot.x.low, plot.y.low / bandwidth)
    corners = [(start, start * bandwidth), (ridge, peak), (plot.x.high, peak)]
    plot.canvas.path([(plot.x(a), plot.y(b)) for a, b in corners], INK, 2)
    plot.canvas.text(plot.x.end, plot.y(peak) - 6, f"matmul {peak:.3g} TFLOP/s", "end", 10)
    middle = (start * ridge) ** 0.5
    label = f"copy {bandwidth * 1e3:,.0f} GB/s"
    plot.canvas.text(plot.x(middle) - 6, plot.y(middle * bandwidth) - 8, label, "end", 10)


@dataclass(frozen=True)
class _Family:
    """Cases that differ in one number."""

    title: str
    axis: str


_SWEPT = re.compile(r"(?P<base>.+) (?P<what>page|dim) (?P<value>\d+)(?:/\d+)?")
_AXES = {"page": "keys per page", "dim": "head_dim"}


def _families_of(record: Record) -> Iterator[tuple[_Family, float]]:
    """Each family that a record belongs to, and its size there."""
    order = "" if record["pages"] == "scattered" else f", {record['pages']} pages"
    for title, axis, size in _places_of(record):
        yield _Family(title + order, axis), size


def _places_of(record: Record) -> Iterator[tuple[str, str, float]]:
    swept = _SWEPT.fullmatch(record["case"])
    if swept is not None:
        axis = _AXES[swept["what"]]
        yield f"{swept['base']}, by {axis}", axis, float(swept["value"])
    elif record["source"] == "synthetic" and " " not in record["case"].removeprefix("decode "):
        sequences, tokens, keys = (record[name] for name in ("sequences", "tokens", "keys"))
        if sequences == 1 and tokens == keys:
            yield "Prefill of one sequence from its start", "tokens", tokens
        elif sequences == 1:
            yield f"{tokens:,} queries over a prefix" if tokens > 1 else "Decode of one sequence", "keys", keys
        if record["case"].startswith("decode "):
            yield f"Decode over {keys / sequences:,.0f} keys a sequence", "sequences", sequences


def size_charts(summary: Summary) -> list[tuple[str, str]]:
    """(title, SVG) of time against size, for each family of cases with at least three sizes."""
    families: dict[_Family, dict[str, dict[float, float]]] = {}
    for case in summary.cases:
        for label, record in case.timed().items():
            for family, size in _families_of(record):
                families.setdefault(family, {}).setdefault(label, {})[size] = record["us"]
    charts = []
    for family, curves in families.items():
        if len({size for curve in curves.values() for size in curve}) >= 3:
            charts.append((family.title, _size_chart(family, curves, summary.labels)))
    return charts


def _size_chart(family: _Family, curves: dict[str, dict[float, float]], labels: Sequence[str]) -> str:
    marks = markers(labels)
    present = [label for label in labels if label in curves]
    canvas = Canvas(WIDTH, 0, f"{family.title}: microseconds against {family.axis}")
    top = legend(canvas, [(label, marks[label]) for label in present], 8, 18, WIDTH - 8) + 16
    canvas.height = top + 260
    sizes = [size for curve in curves.values() for size in curve]
    times = [us for curve in curves.values() for us in curve.values()]
    y = LogScale.around(times, top + 220, top)
    plot = Plot(canvas, LogScale.around(sizes, 44, WIDTH - 14), y)
    plot.axes(family.axis, "us")
    for label in reversed(present):
        points = [(plot.x(size), plot.y(us)) for size, us in sorted(curves[label].items())]
        canvas.path(points, marks[label].colour)
        for (px, py), (size, us) in zip(points, sorted(curves[label].items()), strict=True):
            canvas.mark(px, py, marks[label], f"{label}, {size:,.0f} {family.axis}: {us:,.1f} us")
    return canvas.render()
