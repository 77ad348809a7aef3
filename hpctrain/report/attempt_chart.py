"""The attempts of a run as a Gantt chart: when each was queued and at work, where, and why it ended."""

from __future__ import annotations

from hpctrain.phrases import counted, duration, listed, local_time
from hpctrain.report.bar_rows import BarRow, Stretch, bar_legend, bar_rows
from hpctrain.report.markup import Markup, element, joined
from hpctrain.report.page import folded
from hpctrain.report.run_record import AttemptSpan, RunRecord
from hpctrain.run.ledger import Attempt
from hpctrain.status.accounting import WallTime

SHOWN = 30
"""The newest attempts are open; a run on a busy partition may have hundreds."""
MOST = 200
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
    spans = record.spans[-MOST:]
    if not spans:
        return element("p", "No attempt has begun.", class_="faint")
    begin = min(span.begin for span in spans)
    whole = max(span.end for span in spans) - begin or 1.0
    rows = [_row(span, begin, whole, record) for span in spans]
    used = [part for part in PARTS if any(_seconds(span.account.spent, part[2]) > 0 for span in spans)]
    axis = f"From {local_time(begin)} to {local_time(begin + whole)}, {duration(whole)}."
    parts = [element("p", axis, class_="faint"), bar_legend([(kind, text) for kind, text, _ in used])]
    if len(rows) > SHOWN:
        parts.append(folded(f"{counted(len(rows) - SHOWN, 'earlier attempt')}", bar_rows(rows[:-SHOWN])))
    parts.append(bar_rows(rows[-SHOWN:]))
    if len(record.spans) > MOST:
        parts.append(element("p", f"{len(record.spans) - MOST} attempts before these aren't shown.", class_="faint"))
    return joined(parts)


def _row(span: AttemptSpan, begin: float, whole: float, record: RunRecord) -> BarRow:
    attempt, spent = span.attempt, span.account.spent
    stretches = []
    at = span.begin
    for kind, _, names in PARTS:
        seconds = _seconds(spent, names)
        if seconds > 0:
            title = ", ".join(f"{name.removesuffix('_s')} {duration(getattr(spent, name))}" for name in names)
            stretches.append(Stretch(kind, (at - begin) / whole, seconds / whole, title))
            at += seconds
    if not stretches:
        stretches = [Stretch("working", (at - begin) / whole, 0.0)]
    about = ", ".join(
        filter(
            None,
            [
                f"{counted(attempt.world_size, 'rank')} on {listed(attempt.nodes, shown=4, separator=' ')}"
                if attempt.world_size
                else "",
                f"job {attempt.job_id}" if attempt.job_id else "",
            ],
        )
    )
    return BarRow(
        name=f"attempt {attempt.attempt}", about=about, stretches=stretches, result=_result(attempt, span, record)
    )


def _result(attempt: Attempt, span: AttemptSpan, record: RunRecord) -> str:
    status = record.status
    work = duration(span.end - span.begin - span.account.spent.queued_s)
    if attempt.reason is not None:
        ended = f"{attempt.reason} after {work}"
    elif attempt is status.attempts[-1] and status.state.may_change:
        ended = f"{status.state} for {work}"
    else:
        ended = f"no end was recorded; last seen after {work}"
    steps = ""
    if status.knows_step and attempt.reached_step is not None:
        begun = "?" if attempt.actual_start_step is None else attempt.actual_start_step
        steps = f", steps {begun} to {attempt.reached_step}"
        steps += f", {span.account.steps_lost} lost" if span.account.steps_lost else ""
    return f"{ended}{steps}{f': {attempt.detail}' if attempt.detail else ''}"


def _seconds(spent: WallTime, names: tuple[str, ...]) -> float:
    return sum(float(getattr(spent, name)) for name in names)
