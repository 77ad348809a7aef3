"""The budget of a search by rung: how many steps were trained to pass each rung, and how many runs came that far."""

from __future__ import annotations

from pathlib import Path

from hpctrain.phrases import counted
from hpctrain.report.bar_rows import Part, waterfall
from hpctrain.report.markup import Markup, element, joined
from hpctrain.report.scale import number_text
from hpctrain.run.directory import RunDirectory
from hpctrain.search.journal import Event, read_journal


def rung_chart(home: Path) -> Markup:
    """Draw the steps of each rung; empty for a sweep without rungs."""
    ends = [decision for decision in read_journal(RunDirectory.at(home)) if decision.event is Event.END]
    if not any(end.rung for end in ends):
        return Markup("")
    steps: dict[int, int] = {}
    runs: dict[int, set[int]] = {}
    valued: dict[int, set[int]] = {}
    passed: dict[int, int] = {}
    for end in ends:
        # a run may end several times on its way to a rung
        steps[end.rung] = steps.get(end.rung, 0) + max(0, end.step - passed.get(end.run, 0))
        passed[end.run] = max(end.step, passed.get(end.run, 0))
        runs.setdefault(end.rung, set()).add(end.run)
        if end.value is not None:
            valued.setdefault(end.rung, set()).add(end.run)
    whole = sum(steps.values()) or 1
    parts = []
    for rung, spent in sorted(steps.items()):
        about = f"{counted(len(runs[rung]), 'run')}, {len(valued.get(rung, ()))} with a value"
        share = spent / whole
        result = f"{number_text(spent)} steps, {share:.1%}"
        parts.append(Part(name=f"rung {rung}", about=about, share=share, result=result))
    text = "Steps that were trained to pass each rung, of all runs together; a run continues from the rung before."
    return joined([element("p", text, class_="faint"), waterfall(parts)])
