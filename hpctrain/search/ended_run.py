"""How a run that a search gave to a task has ended, by the run's own records."""

from __future__ import annotations

from hpctrain.config.checkpoint import EVAL_PREFIX
from hpctrain.run.directory import RunDirectory
from hpctrain.run.evaluation import last_evaluation
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason
from hpctrain.search.journal import Decision, Event


def end_of(directory: RunDirectory, begin: Decision, *, best: bool) -> Decision | None:
    """Return the end of what was given to a task; None while it may continue by itself.

    Args:
        directory: of the run.
        begin: the decision that gave it to the task.
        best: whether the run counts with its best value, and not with that of its last evaluation.

    Raises:
        RunDirectoryError: a record of the run has an invalid field.
        OSError: the file system's error.
    """
    ledger = Ledger(directory)
    last = next((attempt for attempt in reversed(ledger.attempts()) if attempt.attempt > begin.claims_before), None)
    if last is None or last.reason is None or last.attempt < ledger.last_claim():
        return None
    reason = last.reason
    if last.continues or (reason.meaning.resumable and reason is not Reason.PAUSED):
        return None
    if reason not in (Reason.PAUSED, Reason.COMPLETED):
        return Decision(event=Event.END, run=begin.run, rung=begin.rung, step=last.end_step or 0, reason=reason.value)
    evaluation = last_evaluation(directory)
    score = None if evaluation is None else evaluation.best
    value: float | None = None
    if evaluation is not None and score is not None:
        value = score.value if best else evaluation.means.get(f"{EVAL_PREFIX}{score.name}")
    return Decision(
        event=Event.END,
        run=begin.run,
        rung=begin.rung,
        step=last.end_step or 0,
        reason=reason.value,
        value=value,
        metric="" if score is None else score.name,
        mode="" if score is None else score.mode,
    )
