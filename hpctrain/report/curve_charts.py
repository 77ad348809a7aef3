"""The curves of a run: a chart for each metric, with training and evaluation in one."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.phrases import counted, page
from hpctrain.report.line_chart import Line, LineChart
from hpctrain.report.markup import Markup, element, joined
from hpctrain.report.page import folded
from hpctrain.report.run_record import RunRecord
from hpctrain.results.curves import Curve

POINTS = 220
"""Points of a curve: more can't be told apart in a chart of this size."""
SHOWN = 12
"""Charts that are open."""
MOST = 40
"""Charts in all: a task may log a value for each of its layers."""
LEFT_OUT = ("train/epoch", "throughput/", "memory/")
"""Names that other charts show, or that are lines by definition."""
PREFIXES = {"train/": ("training", "s0"), "eval/": ("evaluation", "s1")}


def curve_charts(record: RunRecord) -> Markup:
    """Draw the charts, or say why there are none."""
    curves = [curve for name, curve in record.curves.items() if not name.startswith(LEFT_OUT)]
    if not curves:
        return element("p", _why_none(record), class_="faint")
    best = record.status.best
    groups = _grouped(curves, judged="" if best is None else best.name)
    charts = [_chart(name, group, record) for name, group in groups[:MOST]]
    shown = element("div", *charts[:SHOWN], class_="charts")
    parts = [_explained(record), shown]
    if more := charts[SHOWN:]:
        parts.append(folded(f"{counted(len(more), 'more chart')}", element("div", *more, class_="charts")))
    if len(groups) > MOST:
        names = ", ".join(name for name, _ in groups[MOST:][:50])
        text = f"{counted(len(groups) - MOST, 'metric')} not drawn, see metrics.jsonl: {names}"
        parts.append(element("p", text, class_="faint"))
    return joined(parts)


def _why_none(record: RunRecord) -> str:
    if record.status.command:
        return (
            "This program reported no metrics. One that calls session.step(..., metrics={...}) has curves here; see "
            f"{page('reference/session.md')}."
        )
    return "The run has logged no metrics yet."


def _explained(record: RunRecord) -> Markup:
    texts = []
    if any(mark.text.startswith("\u25b8") for mark in record.marks):
        texts.append("\u25b8 and a number: where this attempt resumed.")
    if any(mark.text == "\u25a0" for mark in record.marks):
        texts.append("\u25a0: where the last attempt ended without completing the run.")
    if record.repeated:
        texts.append("Shaded: steps that were repeated after a resume.")
    return element("p", " ".join(texts), class_="faint") if texts else Markup("")


def _grouped(curves: Sequence[Curve], judged: str) -> list[tuple[str, list[Curve]]]:
    """Curves by the name without `train/` and `eval/`: the judged metric first, then losses, then evaluations."""
    groups: dict[str, list[Curve]] = {}
    for curve in sorted(curves, key=lambda curve: curve.name.startswith("eval/")):
        prefix = next((one for one in PREFIXES if curve.name.startswith(one)), "")
        groups.setdefault(curve.name.removeprefix(prefix), []).append(curve)

    def order(item: tuple[str, list[Curve]]) -> tuple[bool, bool, bool]:
        name, group = item
        evaluated = any(curve.name.startswith("eval/") for curve in group)
        return name != judged, name != "loss", not evaluated

    return sorted(groups.items(), key=order)


def _chart(name: str, group: Sequence[Curve], record: RunRecord) -> Markup:
    lines = []
    for curve in group:
        prefix = next((one for one in PREFIXES if curve.name.startswith(one)), "")
        label, style = PREFIXES.get(prefix, (curve.name, "s0"))
        thin = curve.thinned(POINTS)
        evaluated = prefix == "eval/"
        title = curve.name
        lines.append(Line(label=label, xs=thin.steps, ys=thin.values, style=style, title=title, every_point=evaluated))
    caption = name if len(group) > 1 else group[0].name
    last = max((curve.steps[-1] for curve in group), default=0)
    within = [mark for mark in record.marks if mark.x <= last]
    bands = [band for band in record.repeated if band.start < last]
    return LineChart(caption=caption, lines=lines, marks=within, bands=bands).drawn()
