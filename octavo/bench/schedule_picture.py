"""A schedule drawn: an SM per line, time from left to right, each item a bar in its sequence's colour."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

from octavo.bench.svg import FAINT, INK, PAPER, Canvas
from octavo.planning.picture import ListPicture, Picture, Span

WIDTH, LEFT, RIGHT, TOP = 960, 52, 14, 62
MOST_LINES_HEIGHT = 640
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#8a6d00", "#7b3294", "#56a0d3", "#b0436e", "#4d4d4d")
STORES = "#c3c8ce"
NARROWEST = 0.8
"""Width of a bar below which it is drawn as one with its neighbours; more where items are more than MOST_BARS."""
MOST_BARS = 10_000


class Bar(NamedTuple):
    """Items of one worker that follow each other, in user units from the picture's left edge."""

    left: float
    right: float
    spans: list[Span]


def schedule_chart(picture: Picture, title: str) -> str:
    """SVG of which SM works on what, when."""
    sms = picture.machine.num_sms
    height = max(1.5, min(12.0, MOST_LINES_HEIGHT / sms))
    bottom = TOP + height * sms
    canvas = Canvas(WIDTH, bottom + 40, f"Schedule of {title}: which SM works on what, when")
    scale = (WIDTH - LEFT - RIGHT) / max(picture.seconds, 1e-9)
    _head(canvas, picture, title)
    _time_axis(canvas, picture.seconds, scale, bottom)
    for sm in (step for step in _round_steps(sms, 8) if step % 1 == 0):
        canvas.text(LEFT - 6, TOP + height * sm + min(height, 9), f"SM {sm:.0f}", "end", 9)
    for one in picture.lists:
        _draw_list(canvas, one, sms, height, scale)
    bound = LEFT + picture.bound_seconds * scale
    canvas.line(bound, TOP - 4, bound, bottom + 4, INK, 1.2)
    canvas.text(bound - 3, TOP - 6, "roofline", "end", 9)
    return canvas.render()


def _head(canvas: Canvas, picture: Picture, title: str) -> None:
    canvas.text(LEFT, 16, title, size=13)
    lists = "; ".join(
        f"{one.name} list: {len(one.spans)} items of {one.block_m} rows"
        + (f", {one.cut_tiles} tiles in {one.parts} parts" if one.parts else "")
        for one in picture.lists
    )
    canvas.text(LEFT, 31, f"{lists}. Predicted {picture.seconds * 1e6:,.1f} us.")
    canvas.text(LEFT, 45, "A colour is a sequence, grey stores rows without keys, a dark edge is a part of a tile.")


def _draw_list(canvas: Canvas, one: ListPicture, sms: int, height: float, scale: float) -> None:
    """Programs that share an SM have a part of its line each."""
    programs = -(-one.workers // sms)
    lane = height / programs
    many = len(one.spans) > MOST_BARS
    narrowest = scale * (one.end - one.begin) * one.workers / MOST_BARS if many else NARROWEST
    for worker, spans in _by_worker(one).items():
        top = TOP + height * (worker % sms) + lane * (worker // sms)
        for bar in _bars(spans, scale, narrowest):
            _draw_bar(canvas, bar, top, lane, one)


def _by_worker(one: ListPicture) -> dict[int, list[Span]]:
    lanes: dict[int, list[Span]] = {}
    for span in one.spans:
        lanes.setdefault(span.worker, []).append(span)
    return lanes


def _bars(spans: Sequence[Span], scale: float, narrowest: float) -> Iterator[Bar]:
    """One bar an item, or one for several that are too narrow."""
    held: list[Span] = []
    for span in spans:
        held.append(span)
        left, right = LEFT + held[0].begin * scale, LEFT + span.end * scale
        if right - left >= narrowest:
            yield Bar(left, right, held)
            held = []
    if held:
        yield Bar(LEFT + held[0].begin * scale, LEFT + held[-1].end * scale, held)


def _draw_bar(canvas: Canvas, bar: Bar, top: float, height: float, one: ListPicture) -> None:
    item = bar.spans[0].item
    stores = all(s.item.key_end <= s.item.key_begin for s in bar.spans)
    colour = STORES if stores else COLOURS[item.sequence % len(COLOURS)]
    cut = any(s.item.num_splits > 1 for s in bar.spans)
    gap = 0.15 * height if height > 2 else 0.0
    width = max(bar.right - bar.left, 0.2)
    box = f"x='{bar.left:.2f}' y='{top:.2f}' width='{width:.2f}' height='{height - gap:.2f}' fill='{colour}'"
    edge = f"stroke='{INK if cut else PAPER}' stroke-width='{0.6 if width > 3 else 0}'"
    canvas.parts.append(f"<rect {box} {edge}><title>{escape(_tip(bar, one))}</title></rect>")


def _tip(bar: Bar, one: ListPicture) -> str:
    item = bar.spans[0].item
    when = f"{bar.spans[0].begin * 1e6:.1f} to {bar.spans[-1].end * 1e6:.1f} us"
    if len(bar.spans) > 1:
        sequences = sorted({s.item.sequence for s in bar.spans})
        return f"{one.name} list, {len(bar.spans)} items of sequences {sequences[0]} to {sequences[-1]}, {when}"
    rows = f"rows {item.row_begin} to {item.row_begin + item.row_count}"
    part = f", part {item.split + 1} of {item.num_splits}" if item.num_splits > 1 else ""
    keys = f"keys {item.key_begin} to {item.key_end}"
    return f"{one.name} list, sequence {item.sequence}, K/V head {item.kv_head}, {rows}, {keys}{part}, {when}"


def _time_axis(canvas: Canvas, seconds: float, scale: float, bottom: float) -> None:
    microseconds = seconds * 1e6
    for tick in _round_steps(microseconds, 9):
        x = LEFT + tick * 1e-6 * scale
        canvas.line(x, TOP - 2, x, bottom, FAINT)
        canvas.text(x, bottom + 14, f"{tick:g}", "middle", 10)
    canvas.line(LEFT, bottom, WIDTH - RIGHT, bottom, INK)
    canvas.text((LEFT + WIDTH - RIGHT) / 2, bottom + 30, "us, predicted, planning left out", "middle", 10)


def _round_steps(end: float, most: int) -> list[float]:
    """0 and the multiples below `end` of a round step (1, 2 or 5 times a power of ten), at most about `most`."""
    step = 1e-9
    factors = (2.0, 2.5, 2.0)
    turn = 0
    while end / step > most:
        step *= factors[turn % 3]
        turn += 1
    step = float(f"{step:.6g}")
    return [round(i * step, 9) for i in range(int(end / step) + 1) if i * step < end]
