"""The account of a run's wall time by category, computed from its ledger and its submissions.

The ratio is the effective training time ratio of A. Kokolis et al., "Revisiting Reliability in Large-Scale Machine
Learning Research Clusters", HPCA 2025 (doi:10.1109/HPCA61900.2025.00096): the productive time of a run over the wall
time in which it was queued or scheduled, all of its jobs together. Training and evaluation whose results were kept are
productive; restarts, repeated steps and, here, saving are not. The time in which a run was neither queued nor scheduled
isn't counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from hpctrain.run.ledger import Attempt
from hpctrain.run.reason import Reason
from hpctrain.status.state import RunState

_WAITING = (RunState.STARTING, RunState.QUEUED, RunState.HELD)


@dataclass(frozen=True, slots=True, kw_only=True)
class WallTime:
    """Wall time in seconds; every second is counted once.

    Attributes:
        queued_s: submitted or requeued, before the first rank's process; includes the time until SLURM noticed a dead
            node.
        starting_s: from the start of the process to the end of the first new step, without evaluations.
        training_s: steps that were kept.
        evaluating_s: evaluations of steps that were kept.
        saving_s: checkpoints, while the training waited for them.
        lost_s: steps that were repeated, with their evaluations, and the time between an attempt's last sign of life
            and its kill.
        stopping_s: from the last step or save to the recorded end.
    """

    queued_s: float = 0.0
    starting_s: float = 0.0
    training_s: float = 0.0
    evaluating_s: float = 0.0
    saving_s: float = 0.0
    lost_s: float = 0.0
    stopping_s: float = 0.0

    @classmethod
    def sum_of(cls, parts: Sequence[WallTime]) -> WallTime:
        """The sums of each category."""
        return cls(**{name: math.fsum(getattr(part, name) for part in parts) for name in _CATEGORIES})

    @property
    def total_s(self) -> float:
        """The sum of all categories."""
        return math.fsum(getattr(self, name) for name in _CATEGORIES)

    @property
    def shares(self) -> dict[str, float]:
        """Fractions by name, without the suffix; they add up to 1. Empty before any time has passed."""
        total = self.total_s
        return {name.removesuffix("_s"): getattr(self, name) / total for name in _CATEGORIES} if total > 0 else {}

    @property
    def ratio(self) -> float | None:
        """The effective training time ratio; None before any time has passed."""
        total = self.total_s
        return (self.training_s + self.evaluating_s) / total if total > 0 else None


_CATEGORIES = tuple(field.name for field in fields(WallTime))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptAccount:
    """The account of one attempt's wall time.

    Attributes:
        attempt: the attempt's number.
        spent: its wall time, and its time in the queue.
        steps: the steps that it completed; None if they are unknown.
        steps_lost: completed steps that weren't saved, and were repeated or have to be.
    """

    attempt: int
    spent: WallTime
    steps: int | None
    steps_lost: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The account of a run's wall time.

    Attributes:
        attempts: oldest first.
        spent: over all attempts, and the time in the queue since the last one.
        steps_lost: over all attempts.
    """

    attempts: tuple[AttemptAccount, ...]
    spent: WallTime
    steps_lost: int


NOTHING = Account(attempts=(), spent=WallTime(), steps_lost=0)
"""The account of a run without an attempt."""


def account(
    attempts: Sequence[Attempt],
    submissions: Iterable[Mapping[str, Any]],
    *,
    state: RunState,
    saved_step: int,
    now: float,
) -> Account:
    """Account for a run's wall time.

    A time that is missing from a record counts as zero. Times are never negative, though the clocks of two machines may
    disagree.

    Args:
        attempts: oldest first, as recorded in the ledger; an open one with the times in its claim.
        submissions: of the run, with ``job_id`` and ``time``.
        state: of the run.
        saved_step: the step from which it would resume.
        now: epoch seconds.
    """
    submitted = _submission_times(submissions)
    accounts: list[AttemptAccount] = []
    before: Attempt | None = None
    until = float("-inf")
    for place, attempt in enumerate(attempts):
        is_running = attempt is attempts[-1] and attempt.open and state is RunState.RUNNING
        began = _began(attempt)
        if began is None:
            accounts.append(AttemptAccount(attempt=attempt.attempt, spent=WallTime(), steps=None, steps_lost=0))
            continue
        # the clock of this attempt's node may be behind that of the previous attempt's node
        began = max(until, began)
        ended = max(began, now if is_running else end_of(attempt) or began)
        steps = _steps(attempt)
        resume_step = None if is_running or attempt.reason is Reason.COMPLETED else saved_step
        lost = _steps_lost(attempt, attempts[place + 1 :], resume_step)
        spent = _divided(attempt, ended - began, is_running=is_running)
        gap_s = began - _queued_since(attempt, before, began, until, submitted)
        # new ranks in the same allocation weren't queued
        if before is not None and before.restarts_ranks:
            spent = replace(spent, starting_s=spent.starting_s + gap_s)
        else:
            spent = replace(spent, queued_s=gap_s)
        spent = _with_lost_share(spent, lost / steps if steps else 0.0)
        accounts.append(AttemptAccount(attempt=attempt.attempt, spent=spent, steps=steps, steps_lost=lost))
        before, until = attempt, ended
    waiting = WallTime(queued_s=_waiting_s(until, submitted, now) if state in _WAITING else 0.0)
    return Account(
        attempts=tuple(accounts),
        spent=WallTime.sum_of([*(entry.spent for entry in accounts), waiting]),
        steps_lost=sum(entry.steps_lost for entry in accounts),
    )


def _began(attempt: Attempt) -> float | None:
    """When the attempt's first process began, or the first moment known after that; None if none is known."""
    times = (attempt.launched, attempt.start_time, attempt.seen, attempt.end_time)
    return next((moment for moment in times if moment is not None), None)


def end_of(attempt: Attempt) -> float | None:
    """When the attempt was over; without a recorded end, the last moment at which it is known to have run.

    None if no time is known.
    """
    # an attempt without an end is closed when the next one begins, which may be hours later
    times = (attempt.died_at, attempt.seen, attempt.start_time, attempt.launched, attempt.end_time)
    return next((moment for moment in times if moment is not None), None)


def _queued_since(
    attempt: Attempt,
    before: Attempt | None,
    began: float,
    until: float,
    submitted: Mapping[str, Sequence[float]],
) -> float:
    """When the attempt entered the queue: when the previous one in its job ended, or when the job was submitted."""
    if attempt.job_id is None:
        return began
    # a job that trained another run meanwhile has begun with this one again
    earlier = [moment for moment in submitted.get(attempt.job_id, ()) if moment <= began]
    if earlier:
        return max(until, earlier[-1])
    return until if before is not None and before.job_id == attempt.job_id else began


def _divided(attempt: Attempt, wall_s: float, *, is_running: bool) -> WallTime:
    """Divide an attempt's wall time, without the queue, as if all of its steps were kept."""
    starting = attempt.starting_s
    train, evaluate, save = (max(0.0, seconds or 0.0) for seconds in (attempt.train_s, attempt.eval_s, attempt.save_s))
    measured = starting + train + evaluate + save
    shrink = wall_s / measured if measured > wall_s else 1.0
    starting, train, evaluate, save = (shrink * seconds for seconds in (starting, train, evaluate, save))
    remaining_s = max(0.0, wall_s - starting - train - evaluate - save)
    spent = WallTime(starting_s=starting, training_s=train, evaluating_s=evaluate, saving_s=save)
    if not measured and _steps(attempt):
        # an older hpctrain recorded no times: assume that all of it was training
        return replace(spent, training_s=remaining_s)
    if attempt.first_step_s is None and not train:
        return replace(spent, starting_s=starting + remaining_s)
    if is_running:
        return replace(spent, training_s=train + remaining_s)
    if attempt.reason is not None and attempt.reason.meaning.orderly:
        return replace(spent, stopping_s=remaining_s)
    return replace(spent, lost_s=remaining_s)


def _with_lost_share(spent: WallTime, share: float) -> WallTime:
    """Move a share of the steps' time to the lost time."""
    lost = spent.lost_s + share * (spent.training_s + spent.evaluating_s)
    training_s = (1 - share) * spent.training_s
    return replace(spent, training_s=training_s, evaluating_s=(1 - share) * spent.evaluating_s, lost_s=lost)


def _steps(attempt: Attempt) -> int | None:
    reached = attempt.reached_step
    return None if reached is None else max(0, reached - (attempt.actual_start_step or 0))


def _steps_lost(attempt: Attempt, later: Sequence[Attempt], otherwise: int | None) -> int:
    """The steps after the earliest one at which a later attempt began: they were repeated, or have to be."""
    starts = [entry.actual_start_step for entry in later if entry.actual_start_step is not None]
    resumed = min(starts, default=otherwise)
    if resumed is None:
        return 0
    return max(0, (_steps(attempt) or 0) - max(0, resumed - (attempt.actual_start_step or 0)))


def _waiting_s(until: float, submitted: Mapping[str, Sequence[float]], now: float) -> float:
    """Seconds since the end of the last attempt, or since a later submission."""
    since = max([until, *(moment for times in submitted.values() for moment in times)])
    return max(0.0, now - since) if math.isfinite(since) else 0.0


def _submission_times(submissions: Iterable[Mapping[str, Any]]) -> dict[str, list[float]]:
    times_by_job: dict[str, list[float]] = {}
    for record in submissions:
        if "job_id" in record and not (record.get("left") or record.get("waited")):
            times_by_job.setdefault(record["job_id"], []).append(record["time"])
    return times_by_job
