"""A chart of lines, as SVG: scales and axes, curves over steps or time, and marks where a run was interrupted.

Drawn with the standard library alone. Libraries that write HTML put megabytes of script into each page (Plotly 4.5 MB),
or load it from a network. matplotlib needs NumPy on the login node, has fixed colours, and shrinks its text on a phone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from hpctrain.report.page import Markup, element, joined

DECADES = 2.0
"""Powers of ten between the smallest and the largest value from which an axis is logarithmic."""
_MOST_DIGITS = 300
_LARGEST = 1e300
"""Larger values are drawn at the end of the axis: their difference may overflow."""
_SMALLEST = 1e-300
"""Smaller positive values are drawn at the beginning of a logarithmic axis."""
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k"))


@dataclass(frozen=True, slots=True)
class Scale:
    """A linear or logarithmic scale.

    Attributes:
        low: the value at 0.
        high: the value at 1; more than ``low``.
        log: whether equal distances are equal factors; then both are positive.
    """

    low: float
    high: float
    log: bool = False

    def place(self, value: float) -> float:
        """The place of a value, from 0 to 1; values outside of the scale lie at its ends."""
        value = min(max(value, self.low), self.high)
        if self.log:
            low = math.log(self.low)
            return (math.log(value) - low) / (math.log(self.high) - low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, max_ticks: int) -> list[tuple[float, str]]:
        """Round values on the scale, at most so many, each with its text."""
        values = self._log_ticks(max_ticks) if self.log else self._linear_ticks(max_ticks)
        return [(value, number_text(value)) for value in values]

    def _linear_ticks(self, max_ticks: int) -> list[float]:
        rough = (self.high - self.low) / max_ticks
        power = 10.0 ** math.floor(math.log10(rough))
        size = next(power * factor for factor in (1, 2, 5, 10, 20) if power * factor >= rough)
        first, last = math.ceil(self.low / size - 1e-9), math.floor(self.high / size + 1e-9)
        return [round(number * size, 15 - math.ceil(math.log10(size))) if size < 1e15 else number * size
                for number in range(first, last + 1)]  # fmt: skip

    def _log_ticks(self, max_ticks: int) -> list[float]:
        powers = range(math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1)
        if len(powers) < 2:
            below = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            round_values = [factor * 10.0**power for power in below for factor in (1, 2, 5)]
            values = [value for value in round_values if self.low * (1 - 1e-9) <= value <= self.high * (1 + 1e-9)]
            return values[:: math.ceil(len(values) / max_ticks) or 1]
        return [10.0**power for power in powers[:: math.ceil(len(powers) / max_ticks)]]


def scale_of(values: Iterable[float], *, log: bool | None = None, margin: float = 0.0) -> Scale:
    """The scale that holds all finite values.

    Args:
        values: any; those that aren't finite don't count.
        log: None makes it logarithmic if all values are positive and span `DECADES`.
        margin: free space at both ends, as a fraction.
    """
    finite = [min(max(value, -_LARGEST), _LARGEST) for value in values if math.isfinite(value)]
    if not finite:
        return Scale(0.0, 1.0)
    low, high = min(finite), max(finite)
    if log is None:
        log = low > 0 and math.log10(high) - math.log10(low) >= DECADES
    # no number, or few, may lie between the ends of a smaller span
    if high - low < max(10 * _SMALLEST, 1e-12 * max(abs(low), abs(high))):
        if log and low > 0:
            return Scale(max(low / 2, _SMALLEST), max(high, _SMALLEST) * 2, log=True)
        around = abs(low) * 0.05
        around = around if around > _SMALLEST else 1.0
        return Scale(low - around, high + around)
    if log and low > 0:
        low, high = math.log10(max(low, _SMALLEST)), math.log10(high)
        space = (high - low) * margin
        return Scale(10 ** max(low - space, -_MOST_DIGITS), 10 ** min(high + space, _MOST_DIGITS), log=True)
    space = (high - low) * margin
    return Scale(low - space, high + space)


def number_text(value: float) -> str:
    """A number in few characters: ``0.03``, ``1e-5``, ``20k``."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size and (size < 1e-3 or size >= 1e15):
        digits, _, power = f"{value:.3g}".partition("e")
        return f"{digits}e{int(power)}" if power else digits
    for unit, prefix in _PREFIXES:
        if size >= unit:
            # 10,000 is 10k
            return f"{value / (1e3 if prefix == 'k' else unit):.4g}{prefix}"
    return f"{value:.4g}"


# A phone of 360 px shows the chart a little larger than this, so that its text is never smaller than in the style.
WIDTH, HEIGHT = 320, 190
LEFT, RIGHT, TOP, BOTTOM = 54, 8, 16, 34
LABEL_SPACE = 14
"""Units between the texts of two marks, at least."""
FEW_MARKS = 20
"""Up to so many marks are all drawn; of more, those at least `MARK_SPACE` apart."""
MARK_SPACE = 6
FEW_BANDS = 60
"""More bands aren't drawn: they would be stripes, and a large page."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line at a place of the x axis, with a short text above it and a longer title."""

    x: float
    text: str
    title: str


@dataclass(frozen=True, slots=True)
class Band:
    """A shaded stretch of the x axis."""

    start: float
    end: float
    title: str


@dataclass(frozen=True, slots=True)
class Frame:
    """The rectangle between two axes.

    Attributes:
        x: the scale of the x axis.
        y: the scale of the y axis.
        x_ticks: values of the x axis with their texts; None for round numbers.
    """

    x: Scale
    y: Scale
    x_ticks: Sequence[tuple[float, str]] | None = None

    def across(self, value: float) -> float:
        """The place of a value of the x axis in the drawing."""
        return LEFT + self.x.place(value) * (WIDTH - LEFT - RIGHT)

    def down(self, value: float) -> float:
        """The place of a value of the y axis in the drawing."""
        return HEIGHT - BOTTOM - self.y.place(value) * (HEIGHT - TOP - BOTTOM)

    def axes(self, x_label: str) -> Markup:
        """Ticks with their texts, and the grid."""
        bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
        parts = []
        for value, text in self.y.ticks(5):
            place = f"{self.down(value):.1f}"
            parts.append(element("path", d=f"M{LEFT} {place}H{right}", class_="grid"))
            parts.append(element("text", text, x=LEFT - 5, y=place, dy="0.35em", class_="end"))
        for value, text in self.x.ticks(5) if self.x_ticks is None else self.x_ticks:
            across = self.across(value)
            place = f"{across:.1f}"
            parts.append(element("path", d=f"M{place} {bottom}v4", class_="axis"))
            # the text of a tick at the right edge would leave the drawing
            edge = "end" if across > right - 4 * len(text) else "middle"
            parts.append(element("text", text, x=right if edge == "end" else place, y=bottom + 15, class_=edge))
        parts.append(element("path", d=f"M{LEFT} {TOP}V{bottom}H{right}", class_="axis"))
        parts.append(element("text", x_label, x=(LEFT + right) / 2, y=HEIGHT - 4, class_="middle label"))
        return joined(parts)

    def band(self, band: Band) -> Markup:
        """A shaded stretch."""
        first, last = self.across(band.start), self.across(band.end)
        place = {"x": f"{first:.1f}", "y": TOP, "width": f"{max(0.5, last - first):.1f}"}
        return element("rect", element("title", band.title), class_="band", **place, height=HEIGHT - TOP - BOTTOM)

    def marks(self, marks: Iterable[Mark]) -> Iterator[Markup]:
        """Vertical lines with texts above them, as far as these have space."""
        free = last_mark = float("-inf")
        ordered = sorted(marks, key=lambda mark: mark.x)
        for mark in ordered:
            across = self.across(mark.x)
            if len(ordered) > FEW_MARKS and across < last_mark + MARK_SPACE:
                continue
            last_mark = across
            line = element("path", d=f"M{across:.1f} {TOP - 2}V{HEIGHT - BOTTOM}", class_="mark")
            text: object = ""
            if across >= free:
                text = element("text", mark.text, x=f"{across:.1f}", y=TOP - 5, class_="middle marked")
                free = across + LABEL_SPACE + 3 * len(mark.text)
            yield element("g", element("title", mark.title), line, text)


MOST_CROSSES = 40
"""Values that aren't finite and get a cross."""
MARKED_POINTS = 40
"""Lines with at most so many points show each of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line.

    Attributes:
        label: its text in the legend; empty for none.
        xs: rising.
        ys: NaN and infinities interrupt the line.
        style: its class in the style sheet, such as `s0`.
        title: shown by a pointer that rests on it.
        every_point: whether each point has a marker, if there are few.
    """

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    style: str = "s0"
    title: str = ""
    every_point: bool = False


def line_chart(
    caption: str,
    lines: Sequence[Line],
    *,
    x_label: str = "step",
    marks: Sequence[Mark] = (),
    bands: Sequence[Band] = (),
    from_zero: bool = False,
) -> Markup:
    """A figure: caption, legend and drawing.

    Args:
        caption: above the drawing.
        lines: drawn in their order.
        x_label: below the x axis.
        marks: where something happened.
        bands: stretches that are shaded.
        from_zero: whether the y axis begins at 0.
    """
    # steps and times begin at 0
    x = scale_of([0.0, *itertools.chain.from_iterable(line.xs for line in lines)], log=False)
    y = scale_of(itertools.chain.from_iterable(line.ys for line in lines), margin=0.04)
    if from_zero and y.high > 0:
        y = Scale(0.0, y.high)
    frame = Frame(x, y)
    shading = map(frame.band, bands) if len(bands) <= FEW_BANDS else ()
    parts = [*shading, frame.axes(x_label), *frame.marks(marks), *(drawn_line(line, frame) for line in lines)]
    description = f"{caption}, from {number_text(y.low)} to {number_text(y.high)} over {x_label}"
    drawing = element("svg", *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=description)
    note = element("small", " log scale") if y.log else ""
    return element("figure", element("figcaption", caption, note, legend(lines)), drawing)


def legend(lines: Iterable[Line]) -> Markup:
    """Samples of the lines that have a label, each next to it; empty if there is only one line."""
    # what is drawn last, over the others, is the most important
    labelled = list({line.label: line for line in reversed(list(lines)) if line.label}.values())
    if len(labelled) < 2:
        return Markup("")
    return element("span", *(element("span", _sample(line), line.label) for line in labelled), class_="legend")


def _sample(line: Line) -> Markup:
    path = element("path", d="M1 6H27", class_=f"line {line.style}")
    marker = element("circle", cx=14, cy=6, r=3, class_=f"dot {line.style}") if line.every_point else ""
    return element("svg", path, marker, viewBox="0 0 28 12", class_="sample", aria_hidden="true")


def drawn_line(line: Line, frame: Frame) -> Markup:
    """A line, with crosses at the top for values that aren't finite."""
    words: list[str] = []
    points: list[str] = []
    crosses: list[Markup] = []
    begins = True
    for x, y in zip(line.xs, line.ys, strict=True):
        if not math.isfinite(x):
            begins = True
            continue
        across = f"{frame.across(x):.1f}"
        if math.isfinite(y):
            place = f"{across} {frame.down(y):.1f}"
            words.append(f"{'M' if begins else 'L'}{place}")
            points.append(f"M{place}h0")
        elif len(crosses) < MOST_CROSSES:
            what = element("title", f"{line.label or 'value'} is {y} at {number_text(x)}")
            crosses.append(element("path", what, d=f"M{across} {TOP}m-3 0l6 6m0 -6l-6 6", class_="cross"))
        begins = not math.isfinite(y)
    title: object = element("title", line.title or line.label) if line.title or line.label else ""
    paths = [element("path", title, d="".join(words), class_=f"line {line.style}")] if len(points) > 1 else []
    if len(points) == 1 or (line.every_point and len(points) <= MARKED_POINTS):
        paths.append(element("path", title, d="".join(points), class_=f"dots {line.style}"))
    return joined([*paths, *crosses])
