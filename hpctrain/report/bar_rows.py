"""Rows of bars: a text, a track with coloured stretches, and another text. For Gantt charts and waterfalls.

They are HTML: the browser sets the texts at their own size, however narrow the track is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hpctrain.report.markup import Markup, element


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a track.

    Attributes:
        kind: its class in the style sheet.
        start: where it begins, as a fraction of the track.
        size: its length, the same.
        title: shown by a pointer that rests on it.
    """

    kind: str
    start: float
    size: float
    title: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BarRow:
    """A row.

    Attributes:
        name: in bold.
        about: after the name.
        stretches: from left to right.
        result: at the end.
    """

    name: str
    about: str = ""
    stretches: Sequence[Stretch] = ()
    result: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a whole.

    Attributes:
        name: in bold.
        share: of the whole.
        result: at the end, and shown by a pointer that rests on the bar.
        kind: the bar's class in the style sheet.
        about: after the name.
    """

    name: str
    share: float
    result: str
    kind: str = "working"
    about: str = ""


def waterfall(parts: Iterable[Part]) -> Markup:
    """Draw parts of a whole below each other; each begins where the one before it ends."""
    rows, at = [], 0.0
    for part in parts:
        stretch = Stretch(part.kind, at, part.share, part.result)
        rows.append(BarRow(name=part.name, about=part.about, stretches=[stretch], result=part.result))
        at += part.share
    return bar_rows(rows)


def bar_rows(rows: Iterable[BarRow]) -> Markup:
    """Draw rows."""
    return element("div", *map(_row, rows), class_="rows")


def bar_legend(kinds: Iterable[tuple[str, str]]) -> Markup:
    """A sample of each kind of stretch, with its meaning."""
    samples = (element("span", element("i", class_=f"stretch {kind}"), text) for kind, text in kinds)
    return element("p", *samples, class_="legend")


def _row(row: BarRow) -> Markup:
    name = element("div", element("b", row.name), " ", element("span", row.about), class_="what")
    track = element("div", *map(_stretch, row.stretches), class_="track")
    return element("div", name, track, element("div", row.result, class_="result"), class_="row")


def _stretch(stretch: Stretch) -> Markup:
    start = min(max(stretch.start, 0.0), 1.0)
    size = min(max(stretch.size, 0.0), 1.0 - start)
    place = f"left:{100 * start:.2f}%;width:{100 * size:.2f}%"
    return element("i", class_=f"stretch {stretch.kind}", style=place, title=stretch.title or None)
