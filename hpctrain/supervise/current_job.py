"""The SLURM job of this batch script."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from hpctrain.attempt.termination import Termination, diagnose
from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.cluster.slurm_step import needed_job_nodes
from hpctrain.cluster.variables import Variables
from hpctrain.errors import SchedulerError, SupersededError
from hpctrain.retry import retry
from hpctrain.run.directory import RunDirectory
from hpctrain.run.job_records import JobRecords
from hpctrain.run.ledger import Attempt, Ledger
from hpctrain.run.reason import Reason
from hpctrain.scheduler.command import SchedulerSilentError
from hpctrain.scheduler.job import JobState, SlurmJob
from hpctrain.scheduler.slurm import SILENCE_S, Slurm
from hpctrain.supervise.step import step_name

ENDING_S = 60
"""Seconds for the ranks of an earlier supervisor to save and stop."""
KILLING_S = 10
"""Seconds to wait for killed ranks of an earlier supervisor to disappear from SLURM's records."""

T = TypeVar("T")

log = logging.getLogger("hpctrain.supervise")


class CurrentJob:
    """The job of this batch script, and the run's newest attempt in it; any thread may call its methods.

    Args:
        directory: the run.
        slurm: queries and requeues the job.
        environ: the batch script's environment.
        silence_s: seconds for which to retry a query while SLURM doesn't answer.

    Attributes:
        job_id: as users type it.
        nodes: of the job.
        restarts: how often it had been requeued when this allocation began, as its variable says.
        slurms_restarts: the same as SLURM's record of the running job says, which changes at a requeue.
        attempt: the newest that was claimed here; 0 before the first.
        began: epoch seconds of that claim.
    """

    def __init__(
        self, directory: RunDirectory, slurm: Slurm, environ: Mapping[str, str], silence_s: float = SILENCE_S
    ) -> None:
        self.directory = directory
        self.slurm = slurm
        self.silence_s = silence_s
        environment = ClusterEnvironment.from_environment(environ)
        assert environment.job_id is not None
        self.job_id = environment.job_id
        self.restarts = environment.restart_count
        self.slurms_restarts = self.restarts
        self.nodes = needed_job_nodes(Variables(environ))
        self.attempt = 0
        self.began = time.time()
        self._ledger = Ledger(directory)
        self._claiming = threading.Lock()

    def claim(self, *, secret: bool = False) -> int:
        """Claim the run for a new attempt, as `Ledger.claim`."""
        if not self.attempt:
            self._read_restarts()
        self.began = time.time()  # before the claim: a cancel may follow it at once
        with self._claiming:
            self.attempt = self._ledger.claim(secret=secret)
        return self.attempt

    @property
    def cancelled(self) -> bool:
        """Whether the user has typed `python -m hpctrain cancel` for the run since the attempt began."""
        when = JobRecords(self.directory).cancelled_at
        return when is not None and when >= self.began

    @property
    def resubmittable(self) -> bool:
        """Whether hpctrain submitted the job, for this run: the lines of a script that its user wrote are unknown."""
        return JobRecords(self.directory).is_own(self.job_id)

    def find(self, job_ids: Sequence[str]) -> Mapping[str, SlurmJob | None] | None:
        """SLURM's records of jobs of other runs; None if SLURM doesn't answer."""
        return self._ask(lambda: self.slurm.find(job_ids)) if job_ids else {}

    def show(self) -> SlurmJob | None:
        """SLURM's record of the job; None if SLURM doesn't answer."""
        return self._ask(lambda: self.slurm.show(self.job_id))

    def termination(self, received: int | None = None, *, within_s: float = 0.0) -> Termination | None:
        """Ask SLURM whether and why it is ending the job; None if it isn't, or doesn't answer.

        Args:
            received: number of the signal that a rank got, if it is known.
            within_s: the time limit counts as reached so many seconds before.
        """
        return self._ask(lambda: self._termination(received, within_s))

    def requeue(self) -> None:
        """Put the job back into the queue.

        Raises:
            SchedulerError: it can't be requeued.
        """
        self._retry(lambda: self.slurm.requeue(self.job_id, self.slurms_restarts))

    def delay(self, job_ids: Sequence[str], seconds: float) -> None:
        """Let the job, which is back in the queue, start after the end of these jobs; without any, in some seconds.

        Raises:
            SchedulerError: SLURM refuses it, or doesn't answer.
        """
        self._retry(lambda: self.slurm.delay(self.job_id, job_ids, seconds))

    def cancel(self) -> None:
        """End the job, or take it out of the queue.

        Raises:
            SchedulerError: SLURM doesn't answer.
        """
        self._retry(lambda: self.slurm.cancel(self.job_id))

    def may_have_run(self, attempt: Attempt) -> bool:
        """Whether the ranks of an attempt may have been started in this allocation, as far as its start is recorded."""
        restarts = self.restarts if attempt.restart_count is None else attempt.restart_count
        return attempt.job_id in (None, self.job_id) and restarts == self.restarts

    def end_steps(self) -> None:
        """End the ranks that a killed supervisor of this run left behind, after giving them time to save."""
        # SLURM may have lost track of a step, or of its end: don't wait forever
        for number, ending_s in ((signal.SIGTERM, ENDING_S), (signal.SIGKILL, KILLING_S)):
            if not (steps := self._steps()):
                return
            log.info("sending %s to the ranks that a killed supervisor left: %s", number.name, " ".join(steps))
            for step in steps:
                with contextlib.suppress(SchedulerError):  # the next signal, or the attempt's claim, stops them
                    self.slurm.signal_step(step, number)
            deadline = time.monotonic() + ending_s
            while time.monotonic() < deadline and self._steps():
                time.sleep(0.5)

    def _read_restarts(self) -> None:
        """Learn what SLURM counts while the job runs: the variable may differ, and the next count shows a requeue."""
        with contextlib.suppress(SchedulerError):  # then the variable counts
            record = self.slurm.show(self.job_id)
            if record is not None and record.state is JobState.RUNNING and record.restarts is not None:
                self.slurms_restarts = record.restarts

    def _steps(self) -> tuple[str, ...]:
        return self._ask(lambda: self.slurm.steps(self.job_id, step_name(self.directory))) or ()

    def _termination(self, received: int | None, within_s: float) -> Termination | None:
        record = self.slurm.show(self.job_id)
        if record is None:
            return None
        found = diagnose(received, record, restarts=self.slurms_restarts, now=time.time() + within_s)
        if found.reason is None:
            return None
        # the job of a dead node looks like one that was preempted without grace time
        in_doubt = found.requeued and record.preempt_time is None
        if in_doubt or found.reason is Reason.NODE_FAILURE:
            failed = self.slurm.failed_nodes(self.nodes, self.began)
            if failed:
                evidence = f"{' '.join(failed)} failed; {found.evidence}"
                return replace(found, reason=Reason.NODE_FAILURE, evidence=evidence)
        return found

    def _ask(self, question: Callable[[], T | None]) -> T | None:
        def ask() -> T | None:
            # A batch host that is cut off from the network may outlive its job: stop asking once a later attempt owns
            # the run. The lock keeps an attempt that this process is claiming from being taken for a later one. A run
            # directory that can't be read doesn't mean that another attempt owns it.
            with self._claiming, contextlib.suppress(OSError):
                if self.attempt:
                    self._ledger.require_ownership(self.attempt)
            return question()

        try:
            return self._retry(ask)
        except SupersededError:
            return None
        except SchedulerError as error:
            log.info("can't query SLURM about the job: %s", error)
            return None

    def _retry(self, act: Callable[[], T]) -> T:
        return retry(
            act,
            on=SchedulerSilentError,
            for_s=self.silence_s,
            every_s=0.5,
            slowing_to_s=15.0,
            problem="SLURM doesn't answer",
        )
