"""The status of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hpctrain.run.bottleneck import Bottleneck
from hpctrain.run.evaluation import Score
from hpctrain.run.ledger import Attempt
from hpctrain.status.accounting import NOTHING, Account
from hpctrain.status.state import RunState


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """The status of a run; times are epoch seconds.

    Attributes:
        name: the run's name in its configuration.
        path: its directory.
        state: its state.
        note: the reason for the state, and warnings about incomplete logs or unconnected ranks, in one line; or empty.
        command: a program's command as typed, quoted; empty for a training.
        step: the last step known to be completed; of a program, that it reported.
        total_steps: the step at which the run ends; None if only the number of epochs is known.
        metrics: the last value of each metric, NaN and infinities included.
        metrics_time: when the last of them was logged.
        best: the best value of the metric by which the run is judged; None before the first evaluation.
        best_step: its step.
        best_warning: if no checkpoint of this step is on disk, a line on that and on the best one that is; else empty.
        varied: the keys that the run's sweep varied, with the values with which it was trained; empty without a sweep.
        checkpoint_step: of the newest complete checkpoint, or of the newest save that a program reported and that still
            exists; None without one.
        gone_step: of the newest checkpoint that the run saved, if it is gone; None otherwise.
        saved_path: of that save; None for a training.
        set_aside: names of damaged checkpoints that a resume passed over.
        attempts: oldest first; an open one with the times that it has recorded so far.
        account: where the wall time went.
        verdict: the newest bottleneck that an attempt recorded; None without one.
        job_ids: every job of the run, oldest first.
        may_start: when a queued run is expected to start.
        unstarted: whether the newest job ended before it began an attempt, so that the last one has another job.
        job_that_may_run: the job that may still be queued or running, by the run's own records; None if no job is left.
    """

    name: str
    path: Path
    state: RunState
    note: str = ""
    command: str = ""
    step: int = 0
    total_steps: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    metrics_time: float | None = None
    best: Score | None = None
    best_step: int | None = None
    best_warning: str = ""
    varied: Mapping[str, str] = field(default_factory=dict)
    checkpoint_step: int | None = None
    gone_step: int | None = None
    saved_path: str | None = None
    set_aside: tuple[str, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    account: Account = NOTHING
    verdict: Bottleneck | None = None
    job_ids: tuple[str, ...] = ()
    may_start: float | None = None
    unstarted: bool = False
    job_that_may_run: str | None = None

    @property
    def described(self) -> str:
        """The state with its reason, as in ``queued (waiting for nodes)``."""
        return f"{self.state} ({self.note})" if self.note else str(self.state)

    @property
    def knows_step(self) -> bool:
        """Whether `step` means something: not for a program that has reported neither a step nor a save."""
        return not self.command or self.step > 0 or any(attempt.end_step for attempt in self.attempts)

    @property
    def at_step(self) -> str:
        """The words `, at step 12`; empty if the step is unknown."""
        return f", at step {self.step}" if self.knows_step else ""

    @property
    def left_s(self) -> float | None:
        """Seconds of training until the last step, at the pace of the running attempt; None if it is unknown."""
        if self.state is not RunState.RUNNING or self.total_steps is None or not self.attempts:
            return None
        running = self.attempts[-1]
        gained = self.step - (running.actual_start_step or 0)
        spent_s = running.train_s or 0.0
        return max(0, self.total_steps - self.step) * spent_s / gained if gained > 0 and spent_s > 0 else None

    @property
    def last_sign(self) -> float | None:
        """When the run last logged a metric, began an attempt or ended one; None before the first."""
        times = [when for attempt in self.attempts for when in (attempt.start_time, attempt.end_time)]
        return max((when for when in (self.metrics_time, *times) if when is not None), default=None)
