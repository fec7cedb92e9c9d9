"""Drawing primitives for self-contained SVG: a canvas, logarithmic scales, markers that differ in shape and colour."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

INK, FAINT, PAPER = "#1b1f24", "#d4d8dd", "#ffffff"
FONT = "font-family='system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif'"


@dataclass(frozen=True)
class Marker:
    """How one implementation looks, in colour and in black and white."""

    colour: str
    shape: str
    size: float = 4.5


@dataclass
class Canvas:
    """SVG elements in user units; text is 11 units high, so a canvas 480 wide stays readable on a phone."""

    width: float
    height: float
    title: str
    parts: list[str] = field(default_factory=list)

    def line(self, x1: float, y1: float, x2: float, y2: float, colour: str = FAINT, width: float = 1) -> None:
        ends = f"x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}'"
        self.parts.append(f"<line {ends} stroke='{colour}' stroke-width='{width}'/>")

    def path(self, points: Sequence[tuple[float, float]], colour: str, width: float = 1.5) -> None:
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f"<polyline points='{joined}' fill='none' stroke='{colour}' stroke-width='{width}'/>")

    def text(self, x: float, y: float, text: str, anchor: str = "start", size: float = 11) -> None:
        style = f"font-size='{size}' text-anchor='{anchor}' fill='{INK}'"
        self.parts.append(f"<text x='{x:.1f}' y='{y:.1f}' {style}>{escape(text)}</text>")

    def mark(self, x: float, y: float, marker: Marker, tip: str) -> None:
        """A marker that names its figure when pointed at."""
        self.parts.append(f"<g>{_shape(x, y, marker)}<title>{escape(tip)}</title></g>")

    def render(self) -> str:
        box = f"viewBox='0 0 {self.width:.0f} {self.height:.0f}'"
        head = f"<svg xmlns='http://www.w3.org/2000/svg' {box} role='img' {FONT}><title>{escape(self.title)}</title>"
        paper = f"<rect width='100%' height='100%' fill='{PAPER}'/>"
        return "\n".join([head, paper, *self.parts, "</svg>"])


def _shape(x: float, y: float, marker: Marker) -> str:
    r = marker.size
    fill = f"fill='{marker.colour}' stroke='{PAPER}' stroke-width='0.8'"
    stroke = f"fill='none' stroke='{marker.colour}' stroke-width='2'"
    corners = {
        "square": [(-r, -r), (r, -r), (r, r), (-r, r)],
        "triangle": [(0, -1.2 * r), (1.1 * r, 0.9 * r), (-1.1 * r, 0.9 * r)],
        "wedge": [(0, 1.2 * r), (1.1 * r, -0.9 * r), (-1.1 * r, -0.9 * r)],
        "diamond": [(0, -1.3 * r), (1.3 * r, 0), (0, 1.3 * r), (-1.3 * r, 0)],
    }
    if marker.shape in corners:
        points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners[marker.shape])
        return f"<polygon points='{points}' {fill}/>"
    if marker.shape == "cross":
        return f"<path d='M{x - r:.1f} {y - r:.1f}l{2 * r} {2 * r}m0 {-2 * r}l{-2 * r} {2 * r}' {stroke}/>"
    if marker.shape == "plus":
        return f"<path d='M{x - r:.1f} {y:.1f}h{2 * r}M{x:.1f} {y - r:.1f}v{2 * r}' {stroke}/>"
    style = stroke if marker.shape == "ring" else fill
    return f"<circle cx='{x:.1f}' cy='{y:.1f}' r='{r}' {style}/>"


@dataclass(frozen=True)
class LogScale:
    """Values from `low` to `high` onto positions from `start` to `end`, logarithmically; outside ones onto the ends."""

    low: float
    high: float
    start: float
    end: float

    @classmethod
    def around(cls, values: Sequence[float], start: float, end: float) -> "LogScale":
        """With a tenth of a decade of room at both ends."""
        return cls(min(values) / 1.26, max(values) * 1.26, start, end)

    def __call__(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + min(max(share, 0.0), 1.0) * (self.end - self.start)

    def ticks(self, most: int = 7) -> list[float]:
        """Round values inside, `most` at the most: all of 1, 2, 5 per decade, else fewer."""
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        for steps in ((1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
            ticks = [s * 10.0**e for e in range(first, last + 1) for s in steps if self.low <= s * 10.0**e <= self.high]
            if len(ticks) <= most:
                return ticks
        return ticks[:: -(-len(ticks) // most)]


def compact(value: float) -> str:
    """A tick's label: 0.5, 20, 3k, 1M."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


@dataclass(frozen=True)
class Plot:
    """A rectangle with two logarithmic axes."""

    canvas: Canvas
    x: LogScale
    y: LogScale

    def axes(self, x_label: str, y_label: str) -> None:
        left, right, bottom, top = self.x.start, self.x.end, self.y.start, self.y.end
        for tick in self.x.ticks():
            self.canvas.line(self.x(tick), bottom, self.x(tick), top)
            self.canvas.text(self.x(tick), bottom + 14, compact(tick), "middle")
        for tick in self.y.ticks():
            self.canvas.line(left, self.y(tick), right, self.y(tick))
            self.canvas.text(left - 5, self.y(tick) + 4, compact(tick), "end")
        self.canvas.line(left, bottom, right, bottom, INK)
        self.canvas.line(left, bottom, left, top, INK)
        self.canvas.text((left + right) / 2, bottom + 29, x_label, "middle")
        self.canvas.text(left, top - 7, y_label)


def legend(canvas: Canvas, entries: Sequence[tuple[str, Marker]], x: float, y: float, right: float) -> float:
    """Markers with their names, wrapped at `right`; returns the y below the last line."""
    column = x
    for name, marker in entries:
        width = 24 + 6.2 * len(name)
        if column > x and column + width > right:
            column, y = x, y + 17
        canvas.mark(column + 6, y - 4, marker, name)
        canvas.text(column + 15, y, name)
        column += width
    return y + 17
