"""The rectangle of a chart, as SVG: its axes, and what belongs to a place of the x axis."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from hpctrain.report.markup import Markup, element, joined
from hpctrain.report.scale import Scale

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

    def bands(self, bands: Sequence[Band]) -> Iterator[Markup]:
        """Shaded stretches, if they are few."""
        if len(bands) <= FEW_BANDS:
            yield from map(self._band, bands)

    def _band(self, band: Band) -> Markup:
        first, last = self.across(band.start), self.across(band.end)
        place = {
            "x": f"{first:.1f}",
            "y": TOP,
            "width": f"{max(0.5, last - first):.1f}",
            "height": HEIGHT - TOP - BOTTOM,
        }
        return element("rect", element("title", band.title), class_="band", **place)

    def marks(self, marks: Iterable[Mark]) -> Iterator[Markup]:
        """Vertical lines with texts above them, as far as these have space."""
        free = drawn = float("-inf")
        ordered = sorted(marks, key=lambda mark: mark.x)
        for mark in ordered:
            across = self.across(mark.x)
            if len(ordered) > FEW_MARKS and across < drawn + MARK_SPACE:
                continue
            drawn = across
            line = element("path", d=f"M{across:.1f} {TOP - 2}V{HEIGHT - BOTTOM}", class_="mark")
            text: object = ""
            if across >= free:
                text = element("text", mark.text, x=f"{across:.1f}", y=TOP - 5, class_="middle marked")
                free = across + LABEL_SPACE + 3 * len(mark.text)
            yield element("g", element("title", mark.title), line, text)
