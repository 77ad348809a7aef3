"""What the user's command learns of the end of an attempt on SLURM, and how long a batch script waits for it."""

from __future__ import annotations

from dataclasses import replace

from hpctrain.attempt.notification import SOON_S, Notifier
from hpctrain.attempt.outcome import Outcome
from hpctrain.attempt.requeue import Action, RequeueDecision
from hpctrain.errors import ExitCode
from hpctrain.run.reason import Reason


def notify_end(
    notifier: Notifier,
    outcome: Outcome,
    decision: RequeueDecision,
    *,
    attempt: int,
    exit_code: int | None,
    follows: str,
    shares_job: bool,
) -> None:
    """Notify of the end of an attempt; before the batch script ends, wait for the command.

    SLURM kills what is left of a job when its batch script ends. While it is ending the job, or has it back in the
    queue, other jobs or this one wait for the nodes, and SIGKILL follows: the command gets a few seconds.

    Args:
        notifier: of the run.
        outcome: how the attempt ended.
        decision: what was to follow.
        attempt: its number.
        exit_code: of the batch script; None if new ranks start in the same job.
        follows: which job continues the run; empty if none does.
        shares_job: whether the job trains other runs as well.
    """
    reason = Reason.CANCELLED if exit_code == ExitCode.CANCELLED else decision.reason
    follows = "new ranks start in the same job" if exit_code is None else follows
    why = ""
    if decision.action is Action.END:  # the job may be requeued for other runs
        follows = ""
        why = decision.why if decision.why != reason.meaning.why_final else ""
    elif not follows and reason is not Reason.CANCELLED:
        why = "it can't be continued automatically"
    notifier.ended(attempt, replace(outcome, reason=reason), why=why, follows=follows)
    if exit_code is not None:
        is_urgent = follows or reason.meaning.by_slurm or shares_job
        notifier.finish(SOON_S if is_urgent else None)
