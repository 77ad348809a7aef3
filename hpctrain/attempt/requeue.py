"""Whether and how a run goes on after an attempt: the policy, a pure function of the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from hpctrain.attempt.termination import Cause, diagnose
from hpctrain.config.requeue import Requeue
from hpctrain.run.ledger import Attempt
from hpctrain.run.reason import Reason
from hpctrain.scheduler.job import JobRecord


class Action(StrEnum):
    """What happens next."""

    END = "end"
    """The run ends here."""
    RESTART = "restart"
    """New ranks in the same allocation."""
    REQUEUE = "requeue"
    """The same job, back in the queue."""
    RESUBMIT = "resubmit"
    """A new job for the same run."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What happens after an attempt.

    Attributes:
        action: next.
        reason: of the attempt's end; `stalled` where the run was given up for lack of progress.
        why: one line for the log and the ledger.
        exclude: nodes to keep away from.
    """

    action: Action
    reason: Reason
    why: str
    exclude: tuple[str, ...] = ()

    def told(self, suspects: Sequence[str] = ()) -> dict[str, object]:
        """What the end record says of it, and of the nodes that the attempt's failure points at."""
        goes_on = {} if self.action is Action.END else {"next": self.action.value, "requeued_by": "hpctrain"}
        nodes = {"suspects": list(suspects), "exclude": list(self.exclude)}
        return {**goes_on, **{name: names for name, names in nodes.items() if names}}


def decide(
    history: Sequence[Attempt],
    policy: Requeue,
    *,
    in_allocation: int,
    suspects: Sequence[str] = (),
    said_so: bool = False,
    spares: int = 0,
) -> Verdict:
    """The verdict on the newest attempt.

    A run that gains no step is given up, whatever keeps it from that, but for a node whose own rank said that its
    machine failed, and which is blamed for the second time: that isn't the run's fault, and it goes on without the
    node. Ranks that always die without a word are on the same node each time as well, if the run is what kills them.

    Args:
        history: all attempts, oldest first, each with its reason; the newest one last.
        policy: the budgets.
        in_allocation: attempts, the newest among them, that this allocation has seen.
        suspects: nodes that the newest failure points at.
        said_so: whether that is the word of a rank there, and not only that ranks there left none.
        spares: nodes that the allocation holds in reserve.
    """
    last = history[-1]
    assert last.reason is not None
    reason = last.reason
    meaning = reason.meaning
    if not meaning.requeued:
        return Verdict(Action.END, reason, meaning.why_final)
    again = tuple(node for node in suspects if _blamed_before(history[:-1], node))
    if (stalled := _stalled_in_a_row(history)) >= policy.max_stalled_attempts and not (again and said_so):
        why = f"{stalled} attempts in a row gained no step, the last one by {reason.value}: the run can't move on"
        if again:
            why += f", unless it is {' '.join(again)} that fails (cluster.exclude={','.join(again)} would show)"
        return Verdict(Action.END, Reason.STALLED, why)
    if meaning.budget is not None:
        spent = sum(
            attempt.reason is not None and attempt.reason.meaning.budget == meaning.budget for attempt in history
        )
        bound = getattr(policy, meaning.budget)
        if bound is not None and spent > bound:
            why = f"{reason.value} {spent} times, and cluster.requeue.{meaning.budget}={bound} allows no more"
            return Verdict(Action.END, reason, why)
    if meaning.machine_failure:
        return _after_failure(reason, in_allocation, again, spares)
    if reason is Reason.NODE_FAILURE and suspects and len(suspects) <= spares:
        return _replaced(reason, tuple(suspects))
    return Verdict(Action.REQUEUE, reason, f"{reason.value}: back to the queue")


def unless_cancelled(verdict: Verdict, record: JobRecord | None, *, restarts: int) -> Verdict:
    """The verdict; or the end, where the user cancelled the job while its ranks were stopping for another reason.

    Args:
        verdict: on the attempt.
        record: the job, asked for after the ranks were gone; None where SLURM can't be asked.
        restarts: how often the job had been requeued when this allocation began.
    """
    found = diagnose(None, record, restarts=restarts, now=0.0)  # that the job's time is over is no matter here
    if verdict.action is Action.END or found.cause is not Cause.CANCELLED:
        return verdict
    return Verdict(Action.END, Reason.CANCELLED, Reason.CANCELLED.meaning.why_final)


def _replaced(reason: Reason, nodes: tuple[str, ...]) -> Verdict:
    why = f"{reason.value} on {' '.join(nodes)}: new ranks without it, on what the allocation has in reserve"
    return Verdict(Action.RESTART, reason, why, nodes)


def _after_failure(reason: Reason, in_allocation: int, exclude: tuple[str, ...], spares: int) -> Verdict:
    if exclude and len(exclude) <= spares:
        return _replaced(reason, exclude)
    if exclude:
        why = f"{reason.value} on {' '.join(exclude)} again: a new job without it"
        return Verdict(Action.RESUBMIT, reason, why, exclude)
    if in_allocation == 1:
        return Verdict(Action.RESTART, reason, f"{reason.value}: the nodes are still here, and get new ranks")
    return Verdict(Action.REQUEUE, reason, f"{reason.value} again in this allocation: back to the queue for another")


def _stalled_in_a_row(history: Sequence[Attempt]) -> int:
    count = 0
    for attempt in reversed(history):
        if attempt.reason is not None and not attempt.reason.meaning.may_stall:
            continue
        if saved_step(attempt) > (attempt.start_step or 0):
            break
        count += 1
    return count


def saved_step(attempt: Attempt) -> int:
    """The step from which the run could go on after an attempt: what was completed but not saved is no gain."""
    return int(attempt.extra.get("saved_step", attempt.end_step or 0))


def _blamed_before(history: Sequence[Attempt], node: str) -> bool:
    return any(node in attempt.extra.get("suspects", ()) for attempt in history)
