"""Requeue the job after an attempt, or while SLURM is killing it and its ranks still save."""

from __future__ import annotations

import contextlib
import logging
import threading
from dataclasses import replace

from hpctrain.attempt.outcome import Outcome
from hpctrain.attempt.requeue import Action, decide, history_with
from hpctrain.attempt.termination import Termination
from hpctrain.errors import ExitCode, HpctrainError, SchedulerError
from hpctrain.launch.prepare import RunPlan
from hpctrain.run.checkpoints import saved_step
from hpctrain.run.job_records import JobRecords
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason
from hpctrain.scheduler.slurm import Slurm
from hpctrain.supervise.current_job import CurrentJob

log = logging.getLogger("hpctrain.supervise")


def forbid_requeue(slurm: Slurm, job_id: str) -> None:
    """Keep SLURM from starting a job again when it ends; a refusal is only logged."""
    try:
        slurm.forbid_requeue(job_id)
    except SchedulerError as error:
        log.warning("SLURM may start job %s once more (%s); if it does: scancel %s", job_id, error, job_id)


class Requeuer:
    """Requeues the job at most once, whichever thread asks first.

    A job that SLURM is killing is requeued at once: its ranks and this process may be gone before everything is saved
    and recorded. SLURM still lets them run for KillWait seconds, and starts the job again when all of its processes are
    gone (seen on SLURM 22.05).

    Args:
        job: the current one.
        plan: of the run.

    Attributes:
        follows: which job continues the run, in a phrase; empty as long as none does.
    """

    def __init__(self, job: CurrentJob, plan: RunPlan) -> None:
        self.job = job
        self.plan = plan
        self.follows = ""
        # guards the attributes below, and is held during queries to SLURM: two threads must not requeue the job twice
        self._lock = threading.RLock()
        self._termination: Termination | None = None
        self._handled = False
        self._settled = False
        self._requeued = False

    def check_in_background(self) -> None:
        """Check the job in another thread, so that the caller can keep reading srun's output."""
        threading.Thread(target=self.check, daemon=True).start()

    def check(self) -> None:
        """Find out whether SLURM is killing the job; if so, record why, and requeue the job if that is what follows."""
        with self._lock:
            if self._handled:
                return
            try:
                self._handled = self._check()
            except (HpctrainError, OSError) as error:
                log.warning("can't find out whether SLURM is killing the job: %s", error)

    def termination(self, reason: Reason, received: int | None) -> Termination | None:
        """Why SLURM is ending the job, for an attempt that is over; None if it isn't.

        Args:
            reason: why the attempt ended, as its ranks recorded it; SLURM isn't queried if the reason already names it.
            received: number of the signal that a rank got, if it is known.
        """
        with self._lock:
            # A termination that was found while SLURM was killing the job takes precedence: once the job is requeued,
            # SLURM's record no longer distinguishes a time limit from a preemption. Ranks in a container can't ask
            # SLURM, and take any user signal for a time limit.
            is_known = reason.meaning.by_slurm and self.plan.slurm.container.image is None
            if self._termination is not None or is_known:
                return self._termination
            return self.job.termination(received)

    def settle(self) -> bool:
        """Prevent early requeues from now on, because a decision is recorded; return whether the job is requeued."""
        with self._lock:
            self._settled = True
            return self._requeued

    @property
    def cancelled(self) -> bool:
        """Whether `check` found that SLURM is killing the job because its user cancelled it."""
        return self._termination is not None and self._termination.reason is Reason.CANCELLED

    def requeue(self) -> bool:
        """Put the job back into the queue, unless it is there already; return whether it is there."""
        with self._lock:
            if self.cancelled:
                return False
            if not self._requeued:
                try:
                    self.job.requeue()
                except SchedulerError as error:
                    log.info("job %s can't be requeued: %s", self.job.job_id, error)
                    return False
                self._requeued = True
                self.follows = f"job {self.job.job_id} is requeued"
                log.info("%s", self.follows)
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
        termination = self.job.termination()
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
            found = self._termination or self.job.termination(within_s=within_s)
            if found is None:
                return False
            if self.job.cancelled:
                found = replace(found, reason=Reason.CANCELLED)
            self._termination = found
            log.info("SLURM is ending the job: %s (%s)", found.reason, found.logged)
            if not found.requeued and found.reason in (Reason.PREEMPTED, Reason.TIME_LIMIT):
                self.requeue()
            return True

    def take_back(self) -> None:
        """Cancel the job, which was requeued before its ranks had ended, because the run needs no further attempt."""
        try:
            self.job.cancel()
        except SchedulerError as error:
            log.warning("the run is over, but job %s is still in the queue (%s); scancel it", self.job.job_id, error)

    def forbid_requeue(self, exit_code: int) -> None:
        """Keep SLURM from starting the job once more, because the run is over, or continues in another job.

        SLURM is asked only once: this job may hold many nodes.

        Args:
            exit_code: that the batch script is about to return.
        """
        # After a nonzero code SLURM requeues a job if slurm.conf lists that code (RequeueExit), or if it was submitted
        # with --requeue=expedite, from 25.11 on (_set_job_requeue_exit_value in slurmctld's job_mgr.c).
        if exit_code == ExitCode.FINISHED and not self._may_be_requeued_at_its_end():
            return
        forbid_requeue(self.job.slurm, self.job.job_id)

    def _may_be_requeued_at_its_end(self) -> bool:
        """Whether SLURM may requeue the job although its script ends with 0.

        From SLURM 24.05 on, a job that was ever preempted with a grace time is requeued when it ends, even if it was
        requeued and trained on in between (_slurm_rpc_complete_batch_script in slurmctld's proc_req.c).
        """
        if self.job.restarts:
            return True
        try:
            # the signal may have come in this attempt, whose ranks ended all the same
            record = self.job.slurm.show(self.job.job_id)
        except SchedulerError as error:
            log.info("can't find out whether SLURM is preempting the job: %s", error)
            return False
        return record is not None and record.preempt_time is not None

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

        directory = self.job.directory
        if not self.job.resubmittable:
            raise SchedulerError("submit the job's script again with run_dir set to the same folder")
        earlier = [node for attempt in Ledger(directory).attempts() for node in attempt.exclude]
        nodes = ",".join(filter(None, dict.fromkeys((self.plan.slurm.exclude, *earlier, *exclude))))
        config = replace(self.plan.config, cluster=replace(self.plan.slurm, exclude=nodes or None))
        (job_id,) = submit([replace(self.plan, config=config)], directory, continues=continues)
        self.follows = f"the run continues in job {job_id}"
        return job_id

    def _check(self) -> bool:
        """Check the job once; return whether SLURM is killing it and later signals need no further check."""
        found = self.job.termination()
        if found is None or not found.killing:
            return False
        if self.job.cancelled:
            found = replace(found, reason=Reason.CANCELLED)
        log.info("SLURM is killing the job: %s (%s)", found.reason, found.logged)
        self._termination = found
        attempt = self.job.attempt
        if attempt:
            with contextlib.suppress(OSError):  # the requeue matters more
                found.write(self.job.directory.attempt(attempt))
        if found.requeued or found.reason not in (Reason.PREEMPTED, Reason.TIME_LIMIT):
            return attempt > 0
        if not attempt:
            # this process may not live until the first attempt is claimed; if it does, the next signal records why
            if found.reason is Reason.PREEMPTED:
                self._requeue_early()
            return False
        return not self._leads_to_queue(found.reason) or self._requeue_early()

    def _requeue_early(self) -> bool:
        """Requeue the job unless a decision is recorded; return whether later signals need no further check."""
        return self._settled or self.requeue()

    def _leads_to_queue(self, reason: Reason) -> bool:
        """Whether the decision would be a requeue, if the newest attempt ended for this reason at the saved step."""
        outcome = Outcome(reason, saved_step(self.job.directory))
        history = history_with(Ledger(self.job.directory), self.job.attempt, outcome)
        decision = decide(history, self.plan.slurm.requeue, in_allocation=1, is_program=self.plan.is_program)
        return decision.action is Action.REQUEUE

    def _unrecorded_requeues(self) -> int:
        try:
            attempts = Ledger(self.job.directory).attempts()
            # a job that trains several runs may have been requeued before it began with this one
            records = JobRecords(self.job.directory)
            before = records.restarts_before(self.job.job_id)
            waits = records.waits(self.job.job_id)
        except OSError:
            return self.job.restarts
        requeued = [
            entry for entry in attempts if entry.job_id in (None, self.job.job_id) and entry.requeued_by is not None
        ]
        recent = [entry for entry in requeued if entry.restart_count is None or entry.restart_count >= before]
        recorded = waits + sum(not entry.restarts_ranks for entry in recent)
        return self.job.restarts - before - recorded
