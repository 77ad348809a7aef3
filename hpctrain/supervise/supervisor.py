"""The attempts of one allocation: start the ranks, find out how they ended, and do what follows."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import replace

from hpctrain.attempt.outcome import Outcome, record_end, resume_command
from hpctrain.attempt.requeue import Action, RequeueDecision, decide, history_with
from hpctrain.attempt.unrecorded import UnrecordedEnds
from hpctrain.config.cluster import Slurm as SlurmCluster
from hpctrain.errors import ExitCode, HpctrainError, RunDirectoryError, SchedulerError, SupersededError
from hpctrain.launch.prepare import RunPlan
from hpctrain.retry import retry
from hpctrain.run.handover import Handover
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason
from hpctrain.scheduler.slurm import SILENCE_S, Slurm
from hpctrain.supervise.allocation import Allocation
from hpctrain.supervise.current_job import CurrentJob
from hpctrain.supervise.requeuer import Requeuer
from hpctrain.supervise.step import ABORTED, Step, print_error, srun_command

STORAGE_S = 60.0
"""Seconds for which the run directory is tried again while its file system refuses."""
REFUSED = (OSError, RunDirectoryError)

log = logging.getLogger("hpctrain.supervise")


class Supervisor:
    """The attempts of one allocation.

    Args:
        plan: of the run.
        environ: the batch script's environment.
        slurm: where to ask for the job, and to requeue it.
        storage_s: seconds for which a file system may refuse.
        silence_s: seconds for which SLURM may leave a question unanswered.

    Attributes:
        job: the current one.
        requeuer: requeues it.
        ledger: of the run.
        allocation: the job's nodes.
    """

    def __init__(
        self,
        plan: RunPlan,
        environ: Mapping[str, str],
        slurm: Slurm,
        *,
        storage_s: float = STORAGE_S,
        silence_s: float = SILENCE_S,
    ) -> None:
        self.plan = plan
        self.directory = plan.directory
        self.environ = environ
        self.slurm = slurm
        self.storage_s = storage_s
        assert isinstance(plan.config.cluster, SlurmCluster)
        self.cluster = plan.config.cluster
        self.job = CurrentJob(plan.directory, slurm, environ, silence_s)
        self.requeuer = Requeuer(self.job, plan)
        self.ledger = Ledger(plan.directory)
        self.allocation = Allocation(self.job.nodes, plan.resources.num_nodes, self.cluster.spare_nodes > 0)
        self._in_allocation = 0

    def run(self) -> int:
        """Run attempts until the run ends or continues elsewhere; returns the batch script's exit code."""
        if self._begin():
            log.info("the run in %s is completed: nothing to do", self.directory.path)
            return ExitCode.FINISHED
        while True:
            try:
                attempt = self._claim()
            except RunDirectoryError as error:
                return self._leave_unwritable(error)
            complaints = self._run_ranks(attempt)
            try:
                outcome, decision = self._conclude(attempt, complaints)
            except SupersededError:
                log.warning("attempt %d was superseded: this job ends here", attempt)
                return ExitCode.INTERRUPTED
            except REFUSED as error:
                return self._leave_unwritable(error)
            self._record(attempt, outcome, decision)
            if decision.action is not Action.RESTART:
                return self._leave(decision)
            self.allocation.lose(decision.exclude)

    @property
    def _storage_before_ranks_s(self) -> float:
        """Seconds to retry before ranks start: a new run's directory may be a mistake, an older one's was good once."""
        return self.storage_s if self._in_allocation or self.job.restarts else 0.0

    def _begin(self) -> bool:
        """Close earlier attempts; returns whether the run is completed already."""
        ends = UnrecordedEnds(self.directory, self.slurm, self.job.job_id, self.job.restarts)
        with contextlib.suppress(OSError):  # they are left to a later attempt
            retry(
                lambda: ends.close(self.plan.resources.world_size),
                on=REFUSED,
                for_s=self._storage_before_ranks_s,
                problem="an earlier attempt can't be closed",
            )
        try:
            last = next(reversed(self.ledger.attempts()), None)
        except OSError as error:
            log.warning("whether the run is completed is unknown: %s", error)
            return False
        # only this very job, which was requeued after all: a new job makes a completed run longer
        return last is not None and last.reason is Reason.COMPLETED and last.job_id == self.job.job_id is not None

    def _claim(self) -> int:
        return retry(
            self.job.claim,
            on=REFUSED,
            for_s=self._storage_before_ranks_s,
            problem="the run can't be claimed yet",
        )

    def _run_ranks(self, attempt: int) -> str:
        """Run the ranks to their ends; returns what srun complained about."""
        self._in_allocation += 1
        nodes, keeps_spares = self.allocation.step_nodes, self.allocation.keeps_spares
        log.info("attempt %d on %s", attempt, " ".join(nodes))
        command = srun_command(self.plan, nodes if keeps_spares else ())
        environ = {**self.environ, **Handover(attempt=attempt, logged=True).variables()}
        step = Step(command, environ, ends_with_a_node=keeps_spares)
        for line in step.run():
            if ABORTED.match(line):
                # the SIGTERM that a job gets before it is killed may not reach this process
                self.requeuer.check_in_background()
        log.info("srun ended with %d", step.code)
        return "; ".join(step.complaints)

    def _conclude(self, attempt: int, complaints: str) -> tuple[Outcome, RequeueDecision]:
        """Find out how an attempt ended, and decide what follows.

        Raises:
            SupersededError: that is up to a later attempt.
            OSError: the file system refuses to the end.
        """
        return retry(
            lambda: self._try_to_conclude(attempt, complaints),
            on=REFUSED,
            for_s=self.storage_s,
            problem=f"how attempt {attempt} ended can't be read yet",
        )

    def _try_to_conclude(self, attempt: int, complaints: str) -> tuple[Outcome, RequeueDecision]:
        outcome = Outcome.of_attempt(self.directory, attempt, self.plan.resources.world_size, complaints)
        outcome = self._ask_slurm(attempt, outcome)
        decision = decide(
            history_with(self.ledger, attempt, outcome),
            self.cluster.requeue,
            in_allocation=self._in_allocation,
            suspects=self._suspects(outcome),
            reported=outcome.suspect_rank is not None,
            spares=self.allocation.spares,
        )
        if decision.action in (Action.REQUEUE, Action.RESUBMIT) and self.job.job_id is not None:
            # asked again, since the user may have cancelled the job while its ranks saved
            decision = decision.allowed_by(
                self.job.show(), restarts=self.job.restarts, resubmittable=self.job.resubmittable
            )
        self.ledger.require_ownership(attempt)
        return outcome, decision

    def _ask_slurm(self, attempt: int, outcome: Outcome) -> Outcome:
        """The outcome with what SLURM knows: ranks that died while it was ending their job could not tell."""
        if not outcome.may_be_slurms_doing(self.ledger, attempt):
            return outcome
        if self.job.cancelled:
            return replace(outcome, reason=Reason.CANCELLED, report="cancelled by its user")
        termination = self.requeuer.termination(outcome.reason, outcome.stop_signal)
        if termination is None and outcome.reason is not Reason.FAILED and not outcome.reason.meaning.by_slurm:
            return self._ask_about_nodes(outcome)
        return outcome.explained_by(termination)

    def _ask_about_nodes(self, outcome: Outcome) -> Outcome:
        """A job with nodes to spare outlives a node that failed."""
        if not self.allocation.keeps_spares:
            return outcome
        try:
            failed = self.slurm.failed_nodes(self.job.nodes, self.job.began)
        except SchedulerError as error:
            log.info("SLURM could not be asked about the nodes: %s", error)
            return outcome
        if not set(failed) & set(self.allocation.step_nodes):
            self.allocation.lose(failed)
            return outcome
        return Outcome(Reason.NODE_FAILURE, outcome.step, f"{' '.join(failed)} failed", suspects=failed)

    def _suspects(self, outcome: Outcome) -> tuple[str, ...]:
        """Nodes that the failure points at."""
        per_node = self.plan.resources.processes_per_node
        if outcome.suspect_rank is not None:
            # by the name that SLURM uses: --exclude doesn't take the host's own, which may be another one
            return (self.allocation.step_nodes[outcome.suspect_rank // per_node],)
        return outcome.suspects or self.allocation.of_ranks(outcome.silent_ranks, per_node)

    def _record(self, attempt: int, outcome: Outcome, decision: RequeueDecision) -> None:
        suspects = self._suspects(outcome)
        final = replace(outcome, reason=decision.reason)
        if decision.reason is not outcome.reason:
            final = replace(final, report=f"{decision.why}: {outcome.report}")
        with contextlib.suppress(OSError):  # the next attempt closes this one
            retry(
                lambda: record_end(
                    self.directory,
                    attempt,
                    final,
                    world_size=self.plan.resources.world_size,
                    job_id=self.job.job_id,
                    nodes=self.allocation.step_nodes,
                    **decision.fields(suspects),
                ),
                on=REFUSED,
                # SLURM kills this process before long, and the requeue is still to come
                for_s=0.0 if final.reason.meaning.by_slurm else self.storage_s,
                problem=f"the end of attempt {attempt} can't be recorded",
            )
        log.info("attempt %d ended: %s at step %d; %s", attempt, final.reason.value, final.step, decision.why)
        if final.report:
            hint = f"; to resume: {resume_command(self.directory)}" if decision.action is Action.END else ""
            print_error(f"{final.report}{hint}")

    def _leave(self, decision: RequeueDecision) -> int:
        """Do what follows outside of this allocation: a requeue comes last, since it ends this process."""
        exit_code = decision.reason.meaning.exit_code
        if decision.reason is Reason.COMPLETED:
            return exit_code
        requeued = self.requeuer.settle()
        if decision.action is Action.END:
            if requeued:
                self.requeuer.take_back()
            return exit_code
        if self.requeuer.cancelled:
            log.info("the user has cancelled the job meanwhile: it isn't requeued")
            return ExitCode.CANCELLED
        try:
            if decision.action is not Action.REQUEUE or not self.requeuer.requeue():
                log.info("the run continues in job %s", self.requeuer.resubmit(decision.exclude))
        except HpctrainError as error:
            log.warning("the run can't continue by itself (%s); to resume: %s", error, resume_command(self.directory))
        return ExitCode.INTERRUPTED

    def _leave_unwritable(self, error: Exception) -> int:
        """Nothing can be read or written here: the queue may give the file system time, or the job other nodes."""
        print_error(f"hpctrain: {error}; to resume: {resume_command(self.directory)}")
        been_here = self._in_allocation or self.job.restarts
        return ExitCode.INTERRUPTED if been_here and self.requeuer.requeue_unwritable() else ExitCode.FAILED
