"""The job around the batch script: its newest attempt, and what SLURM says of it."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from hpctrain.attempt.taken_away import TakenAway, cancelled_by_user
from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.cluster.nodelist import expand
from hpctrain.errors import SchedulerError, SupersededError
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Ledger
from hpctrain.scheduler.job import JobRecord
from hpctrain.scheduler.patience import PATIENCE_S, patiently
from hpctrain.scheduler.slurm import Slurm

T = TypeVar("T")

log = logging.getLogger("hpctrain.launch")


@dataclass
class ThisJob:
    """The job in which the batch script runs; its methods may be called by any thread.

    Args:
        directory: the run.
        slurm: who is asked.
        environ: the batch script's environment.
        silence_s: how long SLURM may leave a question without an answer.

    Attributes:
        job_id: None outside of a job.
        nodes: of the job.
        restarts: how often it had been requeued when this allocation began.
        attempt: the newest that was claimed here; 0 before the first.
        began: epoch seconds at which that was.
    """

    directory: RunDirectory
    slurm: Slurm
    environ: Mapping[str, str]
    silence_s: float = PATIENCE_S

    def __post_init__(self) -> None:
        """Read the job's place."""
        self.job_id = ClusterEnvironment.from_environment(self.environ).job_id
        self.nodes = tuple(expand(self.environ.get("SLURM_JOB_NODELIST", "")))
        self.restarts = int(self.environ.get("SLURM_RESTART_COUNT", "0"))
        self.attempt, self.began = 0, time.time()
        self._ledger = Ledger(self.directory)
        self._claimed, self._claiming = threading.Event(), threading.Lock()

    def claim(self) -> int:
        """Take the run for a new attempt, as `Ledger.claim`."""
        self.began = time.time()  # before the claim: a cancel may follow it at once
        with self._claiming:
            self.attempt = self._ledger.claim()
        self._claimed.set()
        return self.attempt

    def wait_for_a_claim(self, patience_s: float) -> bool:
        """Whether there is an attempt, or is one within so many seconds."""
        return self._claimed.wait(patience_s)

    @property
    def cancelled(self) -> bool:
        """Whether its user has typed `cancel` for the run meanwhile."""
        return cancelled_by_user(self.directory, self.began)

    def record(self) -> JobRecord | None:
        """What SLURM holds of it; None where it doesn't say."""
        job_id = self.job_id
        return None if job_id is None else self._answer(lambda: self.slurm.show(job_id))

    def taken_away(self, received: int | None = None) -> TakenAway | None:
        """How SLURM takes it away; None where it doesn't, or doesn't say.

        Args:
            received: number of the signal that a rank got, if it is known.
        """
        if self.job_id is None:
            return None
        ask = partial(TakenAway.ask, self.slurm, self.job_id, self.nodes, restarts=self.restarts, since=self.began)
        return self._answer(lambda: ask(received=received))

    def _answer(self, question: Callable[[], T | None]) -> T | None:
        def ask() -> T | None:
            # a batch host that is cut off may outlive its job, and would ask in vain for as long as it is allowed to
            with self._claiming, contextlib.suppress(OSError):  # not to be told isn't to be overtaken
                if self.attempt:
                    self._ledger.require_ownership(self.attempt)
            return question()

        try:
            return patiently(ask, self.silence_s)
        except SupersededError:
            return None
        except SchedulerError as error:
            log.info("SLURM could not be asked about the job: %s", error)
            return None
