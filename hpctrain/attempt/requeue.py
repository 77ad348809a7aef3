"""Decide what follows an attempt.

`decide` is a pure function of the attempts so far and the budgets; `history_with` reads its input.

Why it is like this: docs/adr/0005-the-stop-and-the-requeue.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from hpctrain.attempt.outcome import Outcome
from hpctrain.attempt.termination import diagnose
from hpctrain.config.cluster import Requeue
from hpctrain.phrases import counted
from hpctrain.run.checkpoints import saved_step
from hpctrain.run.ledger import Attempt, EndFacts, Ledger
from hpctrain.run.reason import Reason
from hpctrain.scheduler.job import SlurmJob

NO_PROGRESS_REPORTED = (
    "whether it makes progress can't be seen; `python -m hpctrain run --help` shows how a program reports it"
)
"""Warning for programs that report no steps."""


class Action(StrEnum):
    """The next action for the run."""

    END = "end"
    """The run ends here."""
    RESTART = "restart"
    """New ranks in the same allocation."""
    REQUEUE = "requeue"
    """The same job, back in the queue."""
    RESUBMIT = "resubmit"
    """A new job for the same run."""


@dataclass(frozen=True, slots=True)
class RequeueDecision:
    """The decision on what follows an attempt.

    Attributes:
        action: the next action.
        reason: why the attempt ended; `stalled` if the run ends for lack of progress.
        why: one line for the log and the ledger.
        exclude: nodes to keep away from.
    """

    action: Action
    reason: Reason
    why: str
    exclude: tuple[str, ...] = ()

    def facts(self, suspects: Sequence[str] = ()) -> EndFacts:
        """Return fields of the end record: the next action, nodes to exclude, and nodes that may be at fault."""
        nodes = EndFacts(suspects=tuple(suspects), exclude=self.exclude)
        return nodes if self.action is Action.END else replace(nodes, next=self.action.value, requeued_by="hpctrain")

    def allowed_by(self, record: SlurmJob | None, *, restarts: int, resubmittable: bool) -> RequeueDecision:
        """Adapt the decision to what SLURM allows for the job.

        Args:
            record: SLURM's record of the job, read after the ranks were gone; None if SLURM can't be reached.
            restarts: how often the job had been requeued when this allocation began.
            resubmittable: whether hpctrain wrote the job's script, and can submit it again.
        """
        if self.action not in (Action.REQUEUE, Action.RESUBMIT):
            return self
        # The user may have cancelled the job while its ranks were stopping for another reason; a requeue would revive
        # it. Whether its time is over doesn't matter here, hence now=0.
        if diagnose(None, record, restarts=restarts, now=0.0).reason is Reason.CANCELLED:
            return RequeueDecision(Action.END, Reason.CANCELLED, Reason.CANCELLED.meaning.why_final)
        if record is not None and record.requeue is False:
            if not resubmittable:
                why = f"{self.why}; but SLURM isn't allowed to requeue the job"
                return RequeueDecision(Action.END, self.reason, why)
            if self.action is Action.REQUEUE:
                why = f"{self.why}, in a new job, since SLURM isn't allowed to requeue this one"
                return replace(self, action=Action.RESUBMIT, why=why)
        elif self.action is Action.RESUBMIT and not resubmittable:
            why = f"{self.why}; but back to the queue, since only the job's user can submit its script again"
            return replace(self, action=Action.REQUEUE, why=why, exclude=())
        return self


def history_with(ledger: Ledger, attempt: int, outcome: Outcome) -> list[Attempt]:
    """All attempts up to this one, with its outcome filled in: its end is recorded only after the decision."""
    saved = saved_step(ledger.directory)
    this = ledger.attempt(attempt)
    this = replace(
        this,
        start_step=saved if this.start_step is None else this.start_step,
        reason=outcome.reason,
        end_step=outcome.step,
        saved_step=saved,
    )
    return [*(entry for entry in ledger.attempts() if entry.attempt < attempt), this]


def decide(
    history: Sequence[Attempt],
    policy: Requeue,
    *,
    num_attempts_here: int,
    suspects: Sequence[str] = (),
    machine_fault_reported: bool = False,
    spares: int = 0,
    is_program: bool = False,
) -> RequeueDecision:
    """Decide what follows the newest attempt.

    Args:
        history: all attempts, oldest first, each with its reason; the newest one last.
        policy: the budgets.
        num_attempts_here: attempts, the newest included, that this allocation has seen.
        suspects: nodes that the newest failure points at.
        machine_fault_reported: whether a rank on them reported that its machine failed; if not, ranks on them left no
            exit record.
        spares: nodes that the allocation can lose before it has too few.
        is_program: whether the run is a program's, which may report no steps, or no saves.
    """
    reason = history[-1].reason
    assert reason is not None
    if not reason.meaning.requeued:
        return RequeueDecision(Action.END, reason, reason.meaning.why_final)
    earlier_suspects = {node for attempt in history[:-1] for node in attempt.suspects}
    repeat_suspects = tuple(node for node in suspects if node in earlier_suspects)
    # A node that reports a broken machine twice isn't the run's fault: the run continues without it. Ranks that are
    # killed on the same node each time prove nothing: the task itself may be what kills them.
    if (stalled := _stalled_in_a_row(history, is_program=is_program)) >= policy.max_stalled_attempts and not (
        repeat_suspects and machine_fault_reported
    ):
        attempts = counted(stalled, "attempt")
        why = f"{attempts} in a row gained no step (the last: {reason.value}): the run makes no progress"
        if repeat_suspects:
            why += f"; to find out whether {' '.join(repeat_suspects)} is broken, "
            why += f"resume with cluster.exclude={','.join(repeat_suspects)}"
        return RequeueDecision(Action.END, Reason.STALLED, why)
    if exhausted := _exhausted_budget(history, policy):
        return RequeueDecision(Action.END, reason, exhausted)
    if reason.meaning.machine_failure or reason.meaning.stays_in_allocation:
        return _after_failure(reason, num_attempts_here, repeat_suspects, spares)
    if reason is Reason.NODE_FAILURE and suspects and len(suspects) <= spares:
        return _restart_without(reason, tuple(suspects))
    return RequeueDecision(Action.REQUEUE, reason, f"{reason.value}: back to the queue")


def reports_steps(history: Sequence[Attempt]) -> bool:
    """Whether an attempt of a program has reported a step or a save."""
    return any(attempt.end_step for attempt in history)


def _restart_without(reason: Reason, nodes: tuple[str, ...]) -> RequeueDecision:
    why = f"{reason.value} on {' '.join(nodes)}: new ranks on the other nodes of the allocation"
    return RequeueDecision(Action.RESTART, reason, why, nodes)


def _after_failure(reason: Reason, num_attempts_here: int, exclude: tuple[str, ...], spares: int) -> RequeueDecision:
    if exclude and len(exclude) <= spares:
        return _restart_without(reason, exclude)
    if exclude:
        why = f"{reason.value} on {' '.join(exclude)} again: a new job without it"
        return RequeueDecision(Action.RESUBMIT, reason, why, exclude)
    if num_attempts_here == 1 or reason.meaning.stays_in_allocation:
        why = f"{reason.value}: restarting ranks on the same nodes"
        return RequeueDecision(Action.RESTART, reason, why)
    why = f"{reason.value} again in this allocation: back to the queue for another"
    return RequeueDecision(Action.REQUEUE, reason, why)


def _exhausted_budget(history: Sequence[Attempt], policy: Requeue) -> str:
    """Describe the budget that the newest attempt's reason has exhausted; empty if none is."""
    reason = history[-1].reason
    assert reason is not None
    if (budget := reason.meaning.budget) is None or (bound := getattr(policy, budget)) is None:
        return ""
    spent = 1 + sum(_spends(attempt, budget) for attempt in history[:-1])
    if spent <= bound:
        return ""
    return f"{reason.value} {counted(spent, 'time')}, and cluster.requeue.{budget}={bound} allows no more"


def _spends(attempt: Attempt, budget: str) -> bool:
    """Whether an earlier attempt counts towards a budget."""
    if attempt.reason is None or attempt.reason.meaning.budget != budget:
        return False
    # no automatic follow-up means that the user pressed Ctrl-C and resumed the run later
    return not attempt.reason.meaning.stays_in_allocation or attempt.continues


def _stalled_in_a_row(history: Sequence[Attempt], *, is_program: bool) -> int:
    """Count the newest attempts that gained no step; 0 if nothing can show that the run stalls."""
    if not _may_stall(history[-1]) or (is_program and not reports_steps(history)):
        return 0  # earlier stalled attempts don't count: the user may have resumed the run after it ended as stalled
    count = 0
    for number in range(len(history) - 1, -1, -1):
        if _gained(history, number, is_program=is_program):
            break
        count += _may_stall(history[number])
    return count


def _gained(history: Sequence[Attempt], number: int, *, is_program: bool) -> bool:
    attempt = history[number]
    # the run resumes from a checkpoint: a step that was completed and not saved isn't progress
    saved = (attempt.end_step or 0) if attempt.saved_step is None else attempt.saved_step
    if is_program and not saved:
        # it reports no saves, and shows that it has resumed from one by the steps that it reaches
        return (attempt.end_step or 0) > max((earlier.end_step or 0 for earlier in history[:number]), default=0)
    return saved > (attempt.start_step or 0)


def _may_stall(attempt: Attempt) -> bool:
    return (attempt.reason is None or attempt.reason.meaning.may_stall) and attempt.had_ranks


def next_pause(attempts: Iterable[Attempt], pause_at_step: int | None) -> int | None:
    """The step after which a run pauses.

    A run that has paused there continues when it is resumed. One that was killed before its pause was recorded pauses
    again, at once.

    Args:
        attempts: of the run so far.
        pause_at_step: as configured.

    Returns:
        The step; None if no pause is asked for, or the run has paused at this step, or after it.
    """
    last = max((attempt.end_step or 0 for attempt in attempts if attempt.reason is Reason.PAUSED), default=None)
    return pause_at_step if pause_at_step is None or last is None or last < pause_at_step else None


def final_reason(last: Attempt, pause_at_step: int | None) -> Reason | None:
    """Return the reason why nothing is left to do for a run: completed, or paused as configured; else None.

    Args:
        last: its newest attempt.
        pause_at_step: as configured; a later one than that at which the run has paused lets it continue.
    """
    if last.reason is Reason.PAUSED and pause_at_step is not None and next_pause([last], pause_at_step) is None:
        return last.reason
    return last.reason if last.reason is Reason.COMPLETED else None
