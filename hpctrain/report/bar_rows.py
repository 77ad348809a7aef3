"""Rows of bars: a text, a track with coloured stretches, and another text. For Gantt charts and waterfalls.

They are HTML: the browser sets the texts at their own size, however narrow the track is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hpctrain.phrases import duration
from hpctrain.report.page import Markup, element, joined, remark
from hpctrain.status.accounting import WallTime


@dataclass(frozen=True, slots=True, kw_only=True)
class BarPart:
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


def waterfall(parts: Iterable[BarPart]) -> Markup:
    """Draw parts of a whole below each other; each begins where the one before it ends."""
    rows, at = [], 0.0
    for part in parts:
        rows.append(bar_row(part.name, [stretch(part.kind, at, part.share, part.result)], part.about, part.result))
        at += part.share
    return bar_rows(rows)


def bar_rows(rows: Iterable[Markup]) -> Markup:
    """Rows below each other."""
    return element("div", *rows, class_="rows")


def bar_row(name: str, stretches: Iterable[Markup], about: str, result: str) -> Markup:
    """A row: a name in bold with what is said about it, stretches from left to right, and a result at the end."""
    what = element("div", element("b", name), " ", element("span", about), class_="what")
    track = element("div", *stretches, class_="track")
    return element("div", what, track, element("div", result, class_="result"), class_="row")


def stretch(kind: str, start: float, size: float, title: str = "") -> Markup:
    """A part of a track.

    Args:
        kind: its class in the style sheet.
        start: where it begins, as a fraction of the track.
        size: its length, the same.
        title: shown by a pointer that rests on it.
    """
    start = min(max(start, 0.0), 1.0)
    size = min(max(size, 0.0), 1.0 - start)
    place = f"left:{100 * start:.2f}%;width:{100 * size:.2f}%"
    return element("i", class_=f"stretch {kind}", style=place, title=title or None)


def bar_legend(kinds: Iterable[tuple[str, str]]) -> Markup:
    """A sample of each kind of stretch, with its meaning."""
    samples = (element("span", element("i", class_=f"stretch {kind}"), text) for kind, text in kinds)
    return element("p", *samples, class_="legend")


KINDS = {
    "queued": ("queued", "in SLURM's queue, or between attempts"),
    "starting": ("starting", "until the first new step"),
    "training": ("working", "steps that were kept"),
    "evaluating": ("evaluating", "of steps that were kept"),
    "saving": ("saving", "training waited for a checkpoint"),
    "lost": ("lost", "steps that were repeated, and time until a kill"),
    "stopping": ("stopping", "from the last step or save to the end"),
}
"""The parts of the wall time: class of the bar, and meaning."""


def time_chart(spent: WallTime, *, with_ratio: bool = True) -> Markup:
    """Draw the parts of the wall time below each other; each begins where the one before it ends.

    Args:
        spent: of one run, or of several together.
        with_ratio: whether steps are known: without them, repeated work can't be told from other work.
    """
    wall_s = spent.total_s
    if wall_s <= 0:
        return remark("No time has passed yet.")
    parts = []
    for name, share in spent.shares.items():
        kind, meaning = KINDS[name]
        if share > 0:
            seconds = getattr(spent, f"{name}_s")
            took = duration(seconds) if seconds >= 10 else f"{seconds:.1f} s"
            parts.append(BarPart(name=name, about=meaning, share=share, result=f"{took}, {share:.1%}", kind=kind))
    charts = [waterfall(parts)]
    if with_ratio and spent.ratio is not None:
        text = (
            f" of {duration(wall_s)}: the share of the wall time, the queue included, in which training and evaluation "
            "were done that the run kept."
        )
        charts.insert(0, element("p", element("b", f"Effective training time ratio {spent.ratio:.2f}"), text))
    return joined(charts)
