"""Stop training before its last step: an attempt at a signal or an error, or a run that ends early."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from hpctrain.attempt.outcome import TIME_BOUND
from hpctrain.attempt.termination import Termination, ask_termination, diagnose
from hpctrain.checkpoint.state import Stateful
from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.config.root import Config
from hpctrain.errors import CheckpointError, SchedulerError
from hpctrain.phrases import duration
from hpctrain.rank.agreement import Agreement
from hpctrain.rank.stop_request import Stop, StopKind, StopRequest
from hpctrain.rank.world import World
from hpctrain.run.ledger import Claim
from hpctrain.run.reason import Reason
from hpctrain.scheduler.slurm import Slurm

ASK_TIMEOUT_S = 5.0
"""Seconds to wait for SLURM's answer: after a signal there is no time for a busy controller."""
SAFETY = 1.5
"""A save is tried only if the longest one so far, times this factor, fits into the remaining time."""

log = logging.getLogger("hpctrain.train")


@dataclass(eq=False)
class Stopping:
    """The stop of one attempt.

    Attributes:
        world: the ranks.
        environment: this rank's place.
        request: this rank's request to stop.
        pause_at: the step after which the run pauses; None for no pause.
        claim: of the attempt, where the user's `cancel` leaves a stop file; None without a run directory.
        slurm: is asked for the cause of the stop.
        agreement: of the ranks, on stopping and on saving.
    """

    world: World
    environment: ClusterEnvironment
    request: StopRequest
    _: KW_ONLY
    pause_at: int | None = None
    claim: Claim | None = None
    slurm: Slurm = field(default_factory=lambda: Slurm(os.environ, timeout_s=ASK_TIMEOUT_S))
    _is_paused: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.agreement = Agreement(self.world, self.request)
        self._termination = Termination(None, "")

    @property
    def reason(self) -> Reason:
        """The reason for the end of the attempt, for its record."""
        if self._is_paused:
            return Reason.PAUSED
        # an attempt that stops cleanly wasn't ended by a node failure, even if SLURM reports one for the job
        reason = self._termination.reason
        return Reason.INTERRUPTED if reason in (None, Reason.NODE_FAILURE) else reason

    def begin(self, stop: Stop, save_duration_s: float) -> bool:
        """Find the cause, before the save; collective.

        Args:
            stop: as the ranks agreed upon it.
            save_duration_s: seconds until a save would be durable, as rank zero expects; 0 before the first one.

        Returns:
            Whether there is time for a save.

        Raises:
            Exception: the error for which the ranks stop.
        """
        if stop.kind is StopKind.ERROR:
            raise self.request.error or CheckpointError(
                "rank zero could not write a checkpoint: see its log", elsewhere=True
            )
        fits = True
        if self.world.is_rank_zero:
            self._termination = self._diagnose(stop.signal)
            left_s = None if self._termination.deadline is None else self._termination.deadline - time.time()
            fits = left_s is None or left_s > save_duration_s * SAFETY
            reason = self._termination.reason
            log.info("stopping: %s", ": ".join(filter(None, [reason and reason.value, self._termination.logged])))
            if not fits:
                log.warning("skipping the save: %.1f s are left, and it may take %.1f s", left_s, save_duration_s)
        record, fits = self.world.broadcast((self._termination.as_json(), fits))
        self._termination = Termination.from_json(record)
        return bool(fits)

    def pause(self, step: int) -> None:
        """Pause the run after this step, at which it is saved, unless the ranks agree on a stop; collective.

        The attempt ends as `paused`, and no other follows by itself.

        Raises:
            Exception: the error for which the ranks stop.
        """
        # the stop counts: SLURM may be ending the job, and Ctrl-C is meant for a whole sweep
        if stop := self.agreement.agree_and_calibrate():
            self.begin(stop, 0.0)
            return
        self._is_paused = True
        if self.world.is_rank_zero:
            log.info("step %d: the run pauses here: trainer.pause_at_step=%d is reached", step, self.pause_at)

    def _diagnose(self, received: int) -> Termination:
        if self.claim is not None and self.claim.is_cancelled:
            return Termination(Reason.CANCELLED, "by its user")
        job_id = self.environment.job_id
        if job_id is None:
            name = signal.Signals(received).name
            return Termination(None, "Ctrl-C (SIGINT)" if name == "SIGINT" else name)
        restarts = self.environment.restart_count
        try:
            return ask_termination(self.slurm, job_id, received, restarts=restarts)
        except SchedulerError as error:
            log.warning("can't query SLURM for the cause of the stop: %s", error)
            return diagnose(received, None, restarts=restarts, now=time.time())


class EarlyEnd(Stateful):
    """The decision to end a run before its last step. Rank zero makes it, and the other ranks follow.

    After an evaluation they agree at once; from other hooks as on stops, within about a second, since an agreement
    after each step would cost every step a round trip.

    The decision is part of the checkpoint. It holds until the configuration of the callbacks changes, if a callback has
    made it; whether the time is over is decided again in each attempt.

    Args:
        config: of the run.
        world: the ranks.
        clock: monotonic seconds.

    Attributes:
        requested: whether this rank is rank zero, and wants the run to end.
        is_timed: whether this rank has to look at the clock.
        reason: why the run ends, in one line; empty while it doesn't. Set on every rank once they have agreed.
        evaluated_step: step of the last complete evaluation; None before the first.
        recorded_step: step of the record that such an end has added to the metrics; None without one.
        concluded: whether everything that such an end requires is in the checkpoint of this step.
    """

    def __init__(self, config: Config, world: World, clock: Callable[[], float] = time.monotonic) -> None:
        max_time_min = config.trainer.max_time_min
        self.requested = False
        self.is_timed = max_time_min is not None and world.is_rank_zero
        self.reason = ""
        self.evaluated_step: int | None = None
        self.recorded_step: int | None = None
        self.concluded = False
        self._callbacks = config.callbacks
        self._world = world
        self._clock = clock
        self._max_time_min = max_time_min
        self._max_time_s = (max_time_min or 0.0) * 60
        self._by_callback = False
        self._trained_before_s = 0.0
        self._began = clock()

    @property
    def trained_s(self) -> float:
        """Seconds of training in all attempts, without what a killed attempt trained after its last checkpoint."""
        return self._trained_before_s + self._clock() - self._began

    def begin(self) -> None:
        """Count the training time of this attempt from now on."""
        self._began = self._clock()

    def request(self, reason: str, *, callback: str) -> None:
        """Ask for the end of the run after this step; only rank zero's first request counts.

        Args:
            reason: in one line.
            callback: the name of its entry in the configuration.
        """
        if self._world.is_rank_zero and not self.requested:
            self.requested = True
            self.reason = f"{callback}: {' '.join(reason.split())}"
            self._by_callback = True

    def check_max_time(self) -> None:
        """Ask for the end of the run if its training time is over; only where `is_timed`."""
        if not self.requested and self.trained_s >= self._max_time_s:
            self.requested = True
            self.reason = f"{TIME_BOUND}={self._max_time_min:g}: the run has trained for {duration(self.trained_s)}"

    def note_evaluation(self, step: int) -> None:
        """Note that the evaluation after this step is complete."""
        self.evaluated_step = step

    def note_record(self, step: int) -> None:
        """Note that the end has added a record of this step to the metrics."""
        self.recorded_step = step

    def conclude(self) -> None:
        """Declare the run over: the next save has everything that the end requires."""
        self.concluded = True

    def reopen(self) -> None:
        """Train further after an end that was concluded, as with other callbacks."""
        self.concluded = False

    def agree(self) -> bool:
        """Return whether rank zero wants the run to end, and share its reason; collective."""
        self.reason = str(self._world.broadcast(self.reason if self.requested else ""))
        return bool(self.reason)

    def state(self) -> dict[str, Any]:
        """Return the decision and the training time so far."""
        decided = {"reason": self.reason, "callbacks": self._callbacks} if self._by_callback else {}
        ending = {
            "trained_s": self.trained_s,
            "evaluated_step": self.evaluated_step,
            "recorded_step": self.recorded_step,
            "concluded": self.concluded,
            **decided,
        }
        return {"ending": ending}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Restore the decision, unless the callbacks that made it have changed, and the training time."""
        state = saved.get("ending", {})
        self._trained_before_s = float(state.get("trained_s", 0.0))
        self.evaluated_step = state.get("evaluated_step")
        self.recorded_step = state.get("recorded_step")
        self.concluded = bool(state.get("concluded", False))
        if not self._world.is_rank_zero or "reason" not in state:
            return
        if state["callbacks"] != self._callbacks:
            log.info("the run ended early before (%s); the callbacks have changed, so it continues", state["reason"])
            return
        self.requested = True
        self._by_callback = True
        self.reason = state["reason"]
