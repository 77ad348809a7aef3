"""SLURM's job that this process runs in: its record, why it ends, and its requeue.

Why it is like this: docs/adr/0037-one-room-for-each-thing.md.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from hpctrain.attempt.outcome import Outcome
from hpctrain.attempt.requeue import Action, decide, history_with
from hpctrain.attempt.termination import Termination, ask_termination, diagnose
from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.cluster.slurm_step import needed_job_nodes
from hpctrain.cluster.variables import Variables
from hpctrain.errors import ExitCode, HpctrainError, SchedulerError, SupersededError
from hpctrain.launch.prepare import RunPlan
from hpctrain.retry import retry
from hpctrain.run.checkpoints import saved_step
from hpctrain.run.job_records import JobRecords, cancelled_at
from hpctrain.run.ledger import Attempt, Ledger
from hpctrain.run.reason import Reason
from hpctrain.scheduler.command import SchedulerSilentError
from hpctrain.scheduler.job import JobState, SlurmJob
from hpctrain.scheduler.slurm import SILENCE_S, Slurm

ENDING_S = 60
"""Seconds for the ranks of an earlier supervisor to save and stop."""
KILLING_S = 10
"""Seconds to wait for killed ranks of an earlier supervisor to disappear from SLURM's records."""

T = TypeVar("T")

log = logging.getLogger("hpctrain.supervise")


def forbid_requeue(slurm: Slurm, job_id: str) -> None:
    """Keep SLURM from starting a job again when it ends; a refusal is only logged."""
    try:
        slurm.forbid_requeue(job_id)
    except SchedulerError as error:
        log.warning("SLURM may start job %s once more (%s); if it does: scancel %s", job_id, error, job_id)


class CurrentJob:
    """The job that this batch script runs in, for one run and its newest attempt in it.

    Any thread may call its methods. The job is requeued at most once, whichever thread asks first. A job that SLURM is
    killing is requeued at once: its ranks and this process may be gone before everything is saved and recorded. SLURM
    still lets them run for KillWait seconds, and starts the job again when all of its processes are gone (seen on
    SLURM 22.05).

    Args:
        plan: of the run.
        slurm: queries and requeues the job.
        environ: the batch script's environment.

    Attributes:
        job_id: as users type it.
        nodes: of the job.
        restarts: how often it had been requeued when this allocation began, as its variable says.
        slurms_restarts: the same count, from SLURM's record; it changes at a requeue.
        attempt: the newest that was claimed here; 0 before the first.
        claimed_at: epoch seconds of that claim.
        continuation: which job continues the run, in a phrase; empty as long as none does.
    """

    def __init__(self, plan: RunPlan, slurm: Slurm, environ: Mapping[str, str]) -> None:
        self.plan = plan
        self.directory = plan.directory
        self.slurm = slurm
        environment = ClusterEnvironment.from_environment(environ)
        assert environment.job_id is not None
        self.job_id = environment.job_id
        self.restarts = environment.restart_count
        self.slurms_restarts = self.restarts
        self.nodes = needed_job_nodes(Variables(environ))
        self.attempt = 0
        self.claimed_at = time.time()
        self.continuation = ""
        self._ledger = Ledger(plan.directory)
        self._claiming = threading.Lock()
        # guards the attributes below, and is held during queries to SLURM: two threads must not requeue the job twice;
        # not the one above, or a claim would wait for a silent SLURM
        self._lock = threading.RLock()
        self._termination: Termination | None = None
        self._handled = False
        self._decided = False
        self._requeued = False

    def claim(self, *, secret: bool = False) -> int:
        """Claim the run for a new attempt, as `Ledger.claim`."""
        if not self.attempt:
            self._read_restarts()
        self.claimed_at = time.time()  # before the claim: a cancel may follow it at once
        with self._claiming:
            self.attempt = self._ledger.claim(secret=secret)
        return self.attempt

    @property
    def cancelled(self) -> bool:
        """Whether the user has typed `python -m hpctrain cancel` for the run since the attempt began."""
        when = cancelled_at(JobRecords(self.directory).read())
        return when is not None and when >= self.claimed_at

    @property
    def ends_cancelled(self) -> bool:
        """Whether a query has found that SLURM is ending the job because its user cancelled it."""
        # not one flag with `cancelled`, which is in the run directory: a job whose run directory is unavailable has to
        # be requeued all the same
        return self._termination is not None and self._termination.reason is Reason.CANCELLED

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

    def termination(self, signal_number: int | None = None, *, within_s: float = 0.0) -> Termination | None:
        """Ask SLURM whether and why it is ending the job; None if it isn't, or doesn't answer.

        Args:
            signal_number: number of the signal that a rank got, if it is known.
            within_s: the time limit counts as reached so many seconds before.
        """
        termination = self._ask(
            lambda: ask_termination(
                self.slurm,
                self.job_id,
                signal_number,
                restarts=self.slurms_restarts,
                within_s=within_s,
                nodes=self.nodes,
                since=self.claimed_at,
            )
        )
        # without a record, SLURM doesn't know the job
        return termination if termination is not None and termination.record and termination.reason else None

    def cause(self, outcome: Outcome) -> Termination | None:
        """Return SLURM's reason for ending the job, for an attempt that is over; None if SLURM isn't ending it.

        Args:
            outcome: of the attempt, by its ranks' records; SLURM isn't queried if its reason already names the cause.
        """
        with self._lock:
            # A termination that was found while SLURM was killing the job takes precedence: once the job is requeued,
            # SLURM's record no longer distinguishes a time limit from a preemption. Ranks in a container can't ask
            # SLURM, and take any user signal for a time limit.
            is_known = outcome.reason.meaning.by_slurm and self.plan.slurm.container.image is None
            if self._termination is not None or is_known:
                return self._termination
            return self.termination(outcome.stop_signal)

    def check(self) -> None:
        """Find out whether SLURM is ending the job; if so, record why, and when SLURM will kill it, for its ranks.

        If SLURM is killing the job, requeue it if that is what follows.

        Called when the batch script receives a stop signal, when srun aborts the step, and when a task ends badly.
        """
        with self._lock:
            if self._handled:
                return
            try:
                self._handled = self._check()
            except (HpctrainError, OSError) as error:
                log.warning("can't find out whether SLURM is killing the job: %s", error)

    def forbid_early_requeue(self) -> bool:
        """Requeue no more by `check`, because a decision is recorded; return whether the job is requeued already."""
        with self._lock:
            self._decided = True
            return self._requeued

    def requeue(self) -> bool:
        """Put the job back into the queue, unless it is there already; return whether it is there."""
        with self._lock:
            if self.ends_cancelled:
                return False
            if not self._requeued:
                try:
                    self._retry(lambda: self.slurm.requeue(self.job_id, self.slurms_restarts))
                except SchedulerError as error:
                    log.info("job %s can't be requeued: %s", self.job_id, error)
                    return False
                self._requeued = True
                self.continuation = f"job {self.job_id} is requeued"
                log.info("%s", self.continuation)
            return True

    def requeue_unwritable(self) -> bool:
        """Requeue a job whose run directory can't be written: other nodes, or a later time, may help.

        The ledger can't count such requeues, so SLURM's own count bounds them.

        Returns:
            Whether the job is back in the queue.
        """
        if self._unrecorded_requeues() >= self.plan.slurm.requeue.max_failures:
            return False
        # no query has shown yet whether the user cancelled the job meanwhile
        termination = self.termination()
        if termination is not None and termination.reason is Reason.CANCELLED:
            return False
        return self.requeue()

    def requeue_if_ending(self, within_s: float = 0.0) -> bool:
        """Requeue a job that SLURM is ending although it has more runs to train.

        Args:
            within_s: seconds before the time limit from which on it counts as reached.

        Returns:
            Whether the job ends here, requeued or not.
        """
        with self._lock:
            if self._requeued:
                return True
            termination = self._termination or self.termination(within_s=within_s)
            if termination is None:
                return False
            termination = self._remember(termination, "ending")
            if termination.needs_requeue:
                self.requeue()
            return True

    def cancel_requeue(self) -> None:
        """Cancel the job, which is back in the queue, because the run is over, or continues in another job."""
        try:
            self._retry(lambda: self.slurm.cancel(self.job_id))
        except SchedulerError as error:
            log.warning("job %s is still in the queue (%s), but its run is over; scancel it", self.job_id, error)

    def delay(self, job_ids: Sequence[str], seconds: float) -> None:
        """Let the job, which is back in the queue, start after the end of these jobs; without any, in some seconds.

        Raises:
            SchedulerError: SLURM refuses it, or doesn't answer.
        """
        self._retry(lambda: self.slurm.delay(self.job_id, job_ids, seconds))

    def forbid_requeue(self, exit_code: int) -> None:
        """Keep SLURM from starting the job once more, because the run is over, or continues in another job.

        Unless the job is back in the queue, SLURM is asked only once: this job may hold many nodes. Afterwards SLURM
        also refuses `scontrol requeue` by hand; `resume` continues the run.

        Args:
            exit_code: that the batch script is about to return.
        """
        record = None
        try:
            record = self.slurm.show(self.job_id)
        except SchedulerError as error:
            log.info("can't find out whether SLURM is preempting the job: %s", error)
        if diagnose(None, record, restarts=self.slurms_restarts, now=0.0).requeued:
            self.cancel_requeue()
            return
        # From SLURM 24.05 on, a job that was ever preempted with a grace time is requeued when it ends, even if it was
        # requeued and trained on in between (_slurm_rpc_complete_batch_script in slurmctld's proc_req.c). The signal
        # may also have come in this attempt, whose ranks ended anyway.
        was_preempted = self.restarts or (record is not None and record.preempt_time is not None)
        # After a nonzero code SLURM requeues a job if slurm.conf lists that code (RequeueExit), or if it was submitted
        # with --requeue=expedite, from 25.11 on (_set_job_requeue_exit_value in slurmctld's job_mgr.c).
        if was_preempted or exit_code != ExitCode.FINISHED:
            forbid_requeue(self.slurm, self.job_id)

    def resubmit(self, exclude: tuple[str, ...], *, continues: bool = True) -> str:
        """Submit a new job that keeps away from these nodes, and from those that earlier attempts excluded.

        Args:
            exclude: the nodes.
            continues: whether the new job continues the run at once, and doesn't wait for other runs.

        Returns:
            Its id.

        Raises:
            HpctrainError: SLURM refuses it, or the job's script was written by its user.
        """
        from hpctrain.launch.submission import submit  # submitit is slow to import, and rarely needed here

        if not self.resubmittable:
            raise SchedulerError("submit the job's script again with run_dir set to the same folder")
        earlier = [node for attempt in self._ledger.attempts() for node in attempt.exclude]
        nodes = ",".join(filter(None, dict.fromkeys((self.plan.slurm.exclude, *earlier, *exclude))))
        config = replace(self.plan.config, cluster=replace(self.plan.slurm, exclude=nodes or None))
        (job_id,) = submit([replace(self.plan, config=config)], self.directory, continues=continues)
        self.continuation = f"the run continues in job {job_id}"
        return job_id

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

    def _check(self) -> bool:
        """Check the job once; return whether SLURM is killing it and later signals need no further check."""
        termination = self.termination()
        if termination is None:
            return False
        if termination.killing:
            termination = self._remember(termination, "killing")
        attempt = self.attempt  # once: the main thread may claim the first one meanwhile
        if attempt:
            with contextlib.suppress(OSError):  # the requeue matters more
                termination.write(self.directory.attempt(attempt))
        if not termination.killing:
            return False
        if termination.reason is None or not termination.needs_requeue:
            return attempt > 0
        if not attempt:
            # this process may not live until the first attempt is claimed; if it does, the next signal records why.
            # No budget counts this requeue: waiting for the claim would cost more to read than a missed requeue does
            if termination.reason is Reason.PREEMPTED and not self._decided:
                self.requeue()
            return False
        return not self._leads_to_queue(termination.reason) or self._decided or self.requeue()

    def _remember(self, termination: Termination, what: str) -> Termination:
        """Keep what a query has found, with what the user has typed; return that."""
        if self.cancelled:
            termination = replace(termination, reason=Reason.CANCELLED)
        log.info("SLURM is %s the job: %s (%s)", what, termination.reason, termination.logged)
        self._termination = termination
        return termination

    def _leads_to_queue(self, reason: Reason) -> bool:
        """Whether the decision would be a requeue, if the newest attempt ended for this reason at the saved step."""
        history = history_with(self._ledger, self.attempt, Outcome(reason, saved_step(self.directory)))
        decision = decide(history, self.plan.slurm.requeue, num_attempts_here=1, is_program=self.plan.is_program)
        return decision.action is Action.REQUEUE

    def _unrecorded_requeues(self) -> int:
        try:
            attempts = self._ledger.attempts()
            # a job that trains several runs may have been requeued before it began with this one
            records = JobRecords(self.directory)
            before = records.restarts_before(self.job_id)
            waits = records.waits(self.job_id)
        except OSError:
            return self.restarts
        requeued = [
            entry for entry in attempts if entry.job_id in (None, self.job_id) and entry.requeued_by is not None
        ]
        recent = [entry for entry in requeued if entry.restart_count is None or entry.restart_count >= before]
        recorded = waits + sum(not entry.restarts_ranks for entry in recent)
        return self.restarts - before - recorded

    def _read_restarts(self) -> None:
        """Learn what SLURM counts while the job runs: the variable may differ, and the next count shows a requeue."""
        with contextlib.suppress(SchedulerError):  # then the variable counts
            record = self.slurm.show(self.job_id)
            if record is not None and record.state is JobState.RUNNING and record.restarts is not None:
                self.slurms_restarts = record.restarts

    def _steps(self) -> tuple[str, ...]:
        return self._ask(lambda: self.slurm.steps(self.job_id, self.directory.step_name)) or ()

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
            for_s=SILENCE_S,
            every_s=0.5,
            slowing_to_s=15.0,
            problem="SLURM doesn't answer",
        )
