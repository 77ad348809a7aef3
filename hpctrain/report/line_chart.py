"""A chart of lines, as SVG: curves over steps or time, with marks where a run was interrupted."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hpctrain.report.frame import HEIGHT, TOP, WIDTH, Band, Frame, Mark
from hpctrain.report.markup import Markup, element, joined
from hpctrain.report.scale import Scale, number_text, scale_of

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


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChart:
    """A chart of lines.

    Attributes:
        caption: above it.
        lines: drawn in their order.
        x_label: below the x axis.
        marks: where something happened.
        bands: stretches that are shaded.
        from_zero: whether the y axis begins at 0.
    """

    caption: str
    lines: Sequence[Line]
    x_label: str = "step"
    marks: Sequence[Mark] = ()
    bands: Sequence[Band] = ()
    from_zero: bool = False

    def drawn(self) -> Markup:
        """The figure: caption, legend and drawing."""
        # steps and times begin at 0
        x = scale_of([0.0, *itertools.chain.from_iterable(line.xs for line in self.lines)], log=False)
        ys = list(itertools.chain.from_iterable(line.ys for line in self.lines))
        y = scale_of(ys, margin=0.04)
        if self.from_zero and y.high > 0:
            y = Scale(0.0, y.high)
        frame = Frame(x, y)
        parts = [
            *frame.bands(self.bands),
            frame.axes(self.x_label),
            *frame.marks(self.marks),
            *(drawn_line(line, frame) for line in self.lines),
        ]
        shown = f"{self.caption}, from {number_text(y.low)} to {number_text(y.high)} over {self.x_label}"
        drawing = element("svg", *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=shown)
        note = element("small", " log scale") if y.log else ""
        return element("figure", element("figcaption", self.caption, note, legend(self.lines)), drawing)


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
    drawn = [element("path", title, d="".join(words), class_=f"line {line.style}")] if len(points) > 1 else []
    if len(points) == 1 or (line.every_point and len(points) <= MARKED_POINTS):
        drawn.append(element("path", title, d="".join(points), class_=f"dots {line.style}"))
    return joined([*drawn, *crosses])
