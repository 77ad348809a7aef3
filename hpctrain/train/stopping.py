"""How an attempt leaves when it is asked to stop: the cause, the deadline, and whether a save still fits before it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from hpctrain.attempt.termination import Cause, Diagnosis, diagnose
from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.distributed.world import World
from hpctrain.errors import SchedulerError
from hpctrain.run.reason import Reason
from hpctrain.scheduler.job import JobRecord
from hpctrain.scheduler.slurm import Slurm

ASK_TIMEOUT_S = 5.0
"""Bound on the question to SLURM: a stop is no time to wait for a busy controller."""
SAFETY = 1.5
"""A save gets this many times what it takes by the longest so far before it counts as possible."""

log = logging.getLogger("hpctrain.train")


@dataclass
class Departure:
    """The stop of one attempt.

    Args:
        world: the ranks.
        environment: this rank's place.
        ask: reads the job's record from SLURM.
        clock: epoch seconds.
    """

    world: World
    environment: ClusterEnvironment
    ask: Callable[[str], JobRecord | None] = field(
        default_factory=lambda: Slurm(os.environ, timeout_s=ASK_TIMEOUT_S).show
    )
    clock: Callable[[], float] = time.time
    diagnosis: Diagnosis = field(default_factory=lambda: Diagnosis(Cause.UNKNOWN, None, ""))

    @property
    def reason(self) -> Reason:
        """How the attempt's end is called."""
        known = self.diagnosis.cause not in (Cause.UNKNOWN, Cause.NODE_FAILURE)  # whoever saved didn't die of it
        return Reason(self.diagnosis.cause.value) if known else Reason.INTERRUPTED

    def begin(self, received: int, save_takes_s: float) -> bool:
        """Find out why, before the save; collective.

        Args:
            received: the signal's number, as the ranks agreed on it.
            save_takes_s: seconds until it would be durable, as rank zero expects; 0 where there was none yet.

        Returns:
            Whether there is time for a save.
        """
        fits = True
        if self.world.is_rank_zero:
            self.diagnosis = self._diagnose(received)
            left_s = None if self.diagnosis.deadline is None else self.diagnosis.deadline - self.clock()
            fits = left_s is None or left_s > save_takes_s * SAFETY
            log.info("stopping: %s (%s)", self.diagnosis.cause.value, self.diagnosis.evidence)
            if not fits:
                log.warning("no save: %.1f s are left, and it may take %.1f s", left_s, save_takes_s)
        self.diagnosis, fits = self.world.broadcast((self.diagnosis, fits))
        return bool(fits)

    def _diagnose(self, received: int) -> Diagnosis:
        job_id = self.environment.job_id
        if job_id is None:
            return Diagnosis(Cause.UNKNOWN, None, f"signal {received}, outside of SLURM")
        try:
            record = self.ask(job_id)
        except SchedulerError as error:
            log.warning("SLURM could not be asked for the cause of the stop: %s", error)
            record = None
        return diagnose(received, record, restarts=self.environment.restart_count, now=self.clock())
