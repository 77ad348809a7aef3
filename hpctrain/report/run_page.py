"""The page of a run: its curves, and its attempts as a Gantt chart."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.phrases import counted, duration, listed, local_time, page
from hpctrain.report.bar_rows import bar_legend, bar_row, bar_rows, stretch, time_chart
from hpctrain.report.line_chart import Line, line_chart, number_text
from hpctrain.report.origin import code, configuration, environment, without_secrets
from hpctrain.report.page import (
    Markup,
    charts_in_rows,
    descriptions,
    element,
    facts,
    folded,
    html_page,
    joined,
    remark,
)
from hpctrain.report.run_charts import POINTS, AttemptSpan, RunRecord, speed_charts
from hpctrain.results.curves import Curve
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Attempt
from hpctrain.run.manifest import varied_text
from hpctrain.status.accounting import WallTime
from hpctrain.status.run_status import RunStatus


def run_page(directory: RunDirectory) -> str:
    """Return the page of a run, made from its directory, and from SLURM's records of its jobs where SLURM answers.

    Args:
        directory: of the run, which may be training.
    """
    record = RunRecord.read(directory)
    status = record.status
    # a name and a time, or a sweep and a number
    title = "/".join(directory.path.parts[-2:])
    sections = {
        "Curves": curve_charts(record),
        "Attempts": attempt_chart(record),
        "Where the time went": time_chart(status.account.spent, with_ratio=status.knows_step),
        "Speed": speed_charts(record),
        "Configuration": configuration(directory),
        "Code": code(directory),
        "Environment": environment(directory),
    }
    return html_page(f"{title} {status.state}", _head(status, title), sections)


def _head(status: RunStatus, title: str) -> Markup:
    heading = element("h1", title, " ", element("small", element("span", str(status.state), class_="state")))
    note = element("p", status.note) if status.note else ""
    spent = status.account.spent
    total = "" if status.total_steps is None else f" of {number_text(status.total_steps)}"
    pairs = [("step", f"{status.step}{total}" if status.knows_step else "not reported")]
    if status.best is not None:
        pairs.append((f"best {status.best.name}, at step {status.best_step}", f"{status.best.value:.4g}"))
    pairs.append(("attempts", str(len(status.attempts))))
    pairs.append(("wall time", duration(spent.total_s)))
    if status.knows_step and spent.ratio is not None:
        pairs.append(("effective training time ratio", f"{spent.ratio:.2f}"))
    if status.left_s is not None:
        pairs.append(("left, about", duration(status.left_s)))
    last = status.metrics.get("throughput/samples_per_s")
    if last is not None:
        pairs.append(("samples/s, last", number_text(last)))
    about = [
        ("run", str(status.path)),
        ("program", status.command),
        ("varied", varied_text(without_secrets(status.varied))),
        ("jobs", " ".join(status.job_ids)),
        ("checkpoint", "" if status.checkpoint_step is None else f"step {status.checkpoint_step}"),
        ("gone", "" if status.gone_step is None else f"the checkpoint of step {status.gone_step}"),
        ("damaged", " ".join(status.set_aside)),
        ("warning", status.best_warning),
        *(("not exact", text) for text in status.not_exact),
    ]
    return joined([heading, note, descriptions(about), facts(pairs)])


SHOWN_CHARTS = 12
"""Charts that are open."""
MOST_CHARTS = 40
"""Charts in all: a task may log a value for each of its layers."""
LEFT_OUT = ("train/epoch", "throughput/", "memory/")
"""Names that other charts show, or that are lines by definition."""
PREFIXES = {"train/": ("training", "s0"), "eval/": ("evaluation", "s1")}


def curve_charts(record: RunRecord) -> Markup:
    """Draw the charts, or say why there are none."""
    curves = [curve for name, curve in record.curves.items() if not name.startswith(LEFT_OUT)]
    if not curves:
        reported = "One that calls session.step(..., metrics={...}) has curves here; see"
        program = f"This program reported no metrics. {reported} {page('reference/session.md')}."
        return remark(program if record.status.command else "The run has logged no metrics yet.")
    best = record.status.best
    groups = _grouped(curves, judged="" if best is None else best.name)
    charts = [_chart(name, group, record) for name, group in groups[:MOST_CHARTS]]
    parts = [_explained(record), *charts_in_rows(charts, SHOWN_CHARTS, "chart")]
    if len(groups) > MOST_CHARTS:
        names = ", ".join(name for name, _ in groups[MOST_CHARTS:][:50])
        text = f"{counted(len(groups) - MOST_CHARTS, 'metric')} not drawn, see metrics.jsonl: {names}"
        parts.append(remark(text))
    return joined(parts)


def _explained(record: RunRecord) -> Markup:
    signs = {mark.text[0] for mark in record.marks}
    texts = [
        "\u25b8 and a number: where this attempt resumed." if "\u25b8" in signs else "",
        "\u25a0: where the last attempt ended without completing the run." if "\u25a0" in signs else "",
        "Shaded: steps that were repeated after a resume." if record.repeated else "",
    ]
    return remark(" ".join(filter(None, texts))) if any(texts) else Markup("")


def _grouped(curves: Sequence[Curve], judged: str) -> list[tuple[str, list[Curve]]]:
    """Curves by the name without `train/` and `eval/`: the judged metric first, then losses, then evaluations."""
    groups: dict[str, list[Curve]] = {}
    for curve in sorted(curves, key=lambda curve: curve.name.startswith("eval/")):
        groups.setdefault(curve.name.removeprefix(_prefix(curve)), []).append(curve)

    def order(item: tuple[str, list[Curve]]) -> tuple[bool, bool, bool]:
        name, group = item
        is_evaluation = any(curve.name.startswith("eval/") for curve in group)
        return name != judged, name != "loss", not is_evaluation

    return sorted(groups.items(), key=order)


def _prefix(curve: Curve) -> str:
    return next((prefix for prefix in PREFIXES if curve.name.startswith(prefix)), "")


def _chart(name: str, group: Sequence[Curve], record: RunRecord) -> Markup:
    lines = []
    for curve in group:
        label, style = PREFIXES.get(_prefix(curve), (curve.name, "s0"))
        thin, title, is_evaluation = curve.thinned(POINTS), curve.name, curve.name.startswith("eval/")
        lines.append(
            Line(label=label, xs=thin.steps, ys=thin.values, style=style, title=title, every_point=is_evaluation)
        )
    caption = name if len(group) > 1 else group[0].name
    last = max((curve.steps[-1] for curve in group), default=0)
    within = [mark for mark in record.marks if mark.x <= last]
    bands = [band for band in record.repeated if band.start < last]
    return line_chart(caption, lines, marks=within, bands=bands)


SHOWN_ATTEMPTS = 30
"""The newest attempts are open; a run on a busy partition may have hundreds."""
MOST_ATTEMPTS = 200
PARTS = (
    ("queued", "queued", ("queued_s",)),
    ("starting", "starting", ("starting_s",)),
    ("working", "training, evaluating, saving", ("training_s", "evaluating_s", "saving_s")),
    ("lost", "lost: repeated, or until the kill", ("lost_s",)),
    ("stopping", "stopping", ("stopping_s",)),
)
"""Class, meaning and times of the parts of an attempt, in the order in which they are drawn."""


def attempt_chart(record: RunRecord) -> Markup:
    """Draw the attempts, oldest first."""
    spans = record.spans[-MOST_ATTEMPTS:]
    if not spans:
        return remark("No attempt has begun.")
    begin = min(span.begin for span in spans)
    length_s = max(span.end for span in spans) - begin or 1.0
    rows = [_row(span, begin, length_s, record) for span in spans]
    kinds = [part for part in PARTS if any(_seconds(span.account.spent, part[2]) > 0 for span in spans)]
    axis = f"From {local_time(begin)} to {local_time(begin + length_s)}, {duration(length_s)}."
    parts = [remark(axis), bar_legend([(kind, text) for kind, text, _ in kinds])]
    if earlier := rows[:-SHOWN_ATTEMPTS]:
        parts.append(folded(counted(len(earlier), "earlier attempt"), bar_rows(earlier)))
    parts.append(bar_rows(rows[-SHOWN_ATTEMPTS:]))
    if len(record.spans) > MOST_ATTEMPTS:
        parts.append(remark(f"{len(record.spans) - MOST_ATTEMPTS} attempts before these aren't shown."))
    return joined(parts)


def _row(span: AttemptSpan, begin: float, length_s: float, record: RunRecord) -> Markup:
    attempt, spent = span.attempt, span.account.spent
    stretches = []
    at = span.begin
    for kind, _, names in PARTS:
        seconds = _seconds(spent, names)
        if seconds > 0:
            title = ", ".join(f"{name.removesuffix('_s')} {duration(getattr(spent, name))}" for name in names)
            stretches.append(stretch(kind, (at - begin) / length_s, seconds / length_s, title))
            at += seconds
    if not stretches:
        stretches = [stretch("working", (at - begin) / length_s, 0.0)]
    about = []
    if attempt.world_size:
        nodes = listed(attempt.nodes, max_names=4, separator=" ")
        about.append(f"{counted(attempt.world_size, 'rank')} on {nodes}")
    if attempt.job_id:
        about.append(f"job {attempt.job_id}")
    return bar_row(f"attempt {attempt.attempt}", stretches, ", ".join(about), _result(attempt, span, record))


def _result(attempt: Attempt, span: AttemptSpan, record: RunRecord) -> str:
    status = record.status
    work = duration(span.end - span.work_begin)
    if attempt.reason is not None:
        outcome = f"{attempt.reason} after {work}"
    elif attempt is status.attempts[-1] and status.state.may_change:
        outcome = f"{status.state} for {work}"
    else:
        outcome = f"no end was recorded; last seen after {work}"
    steps = ""
    if status.knows_step and attempt.reached_step is not None:
        first_step = "?" if attempt.actual_start_step is None else attempt.actual_start_step
        steps = f", steps {first_step} to {attempt.reached_step}"
        steps += f", {span.account.steps_lost} lost" if span.account.steps_lost else ""
    return f"{outcome}{steps}{f': {attempt.detail}' if attempt.detail else ''}"


def _seconds(spent: WallTime, names: tuple[str, ...]) -> float:
    return sum(float(getattr(spent, name)) for name in names)
