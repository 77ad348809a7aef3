"""Run the attempts of one allocation: find out how their ranks ended, and restart or requeue.

Why it is like this: docs/adr/0005-the-stop-and-the-requeue.md.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TypeVar

from hpctrain.attempt.notification import SOON_S, Notifier
from hpctrain.attempt.out_of_memory import with_memory_advice
from hpctrain.attempt.outcome import Outcome, record_end, resume_advice, resume_command
from hpctrain.attempt.requeue import (
    NO_PROGRESS_REPORTED,
    Action,
    RequeueDecision,
    decide,
    final_reason,
    history_with,
    reports_steps,
)
from hpctrain.attempt.unrecorded import UnrecordedEnds
from hpctrain.errors import ExitCode, HpctrainError, RunDirectoryUnavailableError, SchedulerError, SupersededError
from hpctrain.launch.prepare import RunPlan
from hpctrain.retry import retry
from hpctrain.run.code import CodeSnapshot, code_for_attempt
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason
from hpctrain.run.start_record import nodes_by_rank
from hpctrain.scheduler.slurm import Slurm
from hpctrain.supervise.allocation import Allocation
from hpctrain.supervise.job import CurrentJob
from hpctrain.supervise.ranks import Ranks, RanksEnd, print_error
from hpctrain.supervise.waiting import exit_code_before_attempts

STORAGE_S = 60.0
"""Seconds to retry I/O in the run directory while its file system is unavailable."""
STORAGE_ERRORS = (OSError, RunDirectoryUnavailableError)
"""Errors of I/O in the run directory while its file system is unavailable."""

T = TypeVar("T")

log = logging.getLogger("hpctrain.supervise")


class Supervisor:
    """Runs the attempts of one allocation.

    It is the batch script's program, since ranks can't report their own death, and sites forbid daemons on login nodes.
    torchrun's agent would restart after any failure, and knows nothing of preemption.

    Args:
        plan: of the run.
        environ: the batch script's environment.
        slurm: queries and requeues the job.
        shares_job: whether the job trains other runs as well, and is needed after the end of this one.

    Attributes:
        job: of the batch script.
        notifier: starts the user's command when the state of the run changes.
        ledger: of the run.
        allocation: the job's nodes.
        ranks: starts the ranks on them.
    """

    def __init__(self, plan: RunPlan, environ: Mapping[str, str], slurm: Slurm, *, shares_job: bool = False) -> None:
        self.plan = plan
        self.directory = plan.directory
        self.shares_job = shares_job
        self.job = CurrentJob(plan, slurm, environ)
        self.notifier = Notifier(plan.directory, plan.config, environ, self.job.job_id)
        self.ledger = Ledger(plan.directory)
        self.allocation = Allocation(self.job.nodes, plan.node_counts, plan.outlives_a_node)
        self.ranks = Ranks(self.job, environ, self.allocation)
        self._num_attempts_here = 0
        # of the newest attempt: the allocation may lose nodes before that attempt is recorded
        self._world_size = plan.resources.world_size
        self._is_warned = False

    def run(self) -> int:
        """Run attempts until the run ends or continues elsewhere.

        Returns:
            The batch script's exit code, by which SLURM shows FAILED for a run that failed.

        Raises:
            RunDirectoryError: a record of the run has an invalid field.
        """
        if (exit_code := self._before_attempts()) is not None:
            return exit_code
        while True:
            try:
                code, damage = self._before_ranks(
                    lambda: code_for_attempt(self.directory), "the run's code can't be read yet"
                )
                attempt = self._claim()
            except STORAGE_ERRORS as error:
                return self._leave_unwritable(error)
            ranks_end = RanksEnd(refusal=damage) if damage else self._run_ranks(attempt, code)
            try:
                outcome, decision = retry(
                    partial(self._conclude, attempt, ranks_end),
                    on=STORAGE_ERRORS,
                    for_s=STORAGE_S,
                    problem=f"how attempt {attempt} ended can't be read yet",
                )
            except SupersededError:
                log.warning("attempt %d was superseded: this job ends here", attempt)
                if self._continues_elsewhere():
                    self._forbid_requeue(ExitCode.INTERRUPTED)
                return ExitCode.INTERRUPTED
            except STORAGE_ERRORS as error:
                return self._leave_unwritable(error)
            self._record(attempt, outcome, decision, None if code is None else code.digest)
            # a requeue comes first: it must not wait for the user's command
            exit_code = None if decision.action is Action.RESTART else self._leave(decision)
            self._notify(attempt, outcome, decision, exit_code)
            if exit_code is not None:
                return exit_code
            self.allocation.lose(decision.exclude)

    def _before_attempts(self) -> int | None:
        """Return the batch script's exit code if no attempt begins: the run is over, or other runs come before it."""
        if (over := self._close_earlier_attempts()) is not None:
            log.info("the run in %s is %s: nothing to do", self.directory.path, over.value)
            return over.meaning.exit_code
        try:
            return exit_code_before_attempts(self.job, self.notifier)
        except STORAGE_ERRORS as error:
            return self._leave_unwritable(error)

    def _before_ranks(self, act: Callable[[], T], problem: str) -> T:
        """Retry I/O before ranks start, but not for a new run, whose directory may be a mistake."""
        for_s = STORAGE_S if self._num_attempts_here or self.job.restarts else 0.0
        return retry(act, on=STORAGE_ERRORS, for_s=for_s, problem=problem)

    def _close_earlier_attempts(self) -> Reason | None:
        """End and close earlier attempts; return why there is nothing to do, if so: completed or paused."""
        with contextlib.suppress(OSError):  # if their ranks still run, the next claim stops them
            newest = self.ledger.attempt(self.ledger.last_claim())
            if newest.attempt and newest.open and self.job.may_have_run(newest):
                self.job.end_steps()
        ends = UnrecordedEnds(self.directory, self.job.slurm, self.job.job_id, self.job.restarts)
        with contextlib.suppress(OSError):  # they are left to a later attempt
            self._before_ranks(lambda: ends.close(self.plan.resources.world_size), "an earlier attempt can't be closed")
        try:
            attempts = self.ledger.attempts()
        except OSError as error:
            log.warning("can't find out whether the run is completed: %s", error)
            return None
        # only if this job itself ended the run and was requeued anyway: a new job is meant to train it further
        if not attempts or attempts[-1].job_id != self.job.job_id:
            return None
        return final_reason(attempts[-1], None if self.plan.is_program else self.plan.training.trainer.pause_at_step)

    def _claim(self) -> int:
        self._world_size = self.allocation.num_nodes * self.plan.resources.processes_per_node
        secret = self._world_size > 1 and not self.plan.is_program
        return self._before_ranks(lambda: self.job.claim(secret=secret), "the run can't be claimed yet")

    def _run_ranks(self, attempt: int, code: CodeSnapshot | None) -> RanksEnd:
        self._num_attempts_here += 1
        log.info("attempt %d on %s", attempt, self.allocation.described)
        if self._num_attempts_here == 1:  # the last notification already said that new ranks follow
            self.notifier.started(attempt, self.allocation.described)
        return self.ranks.run(attempt, code, num_attempts_here=self._num_attempts_here)

    def _conclude(self, attempt: int, ranks_end: RanksEnd) -> tuple[Outcome, RequeueDecision]:
        """Find out how an attempt ended, and decide what follows.

        Raises:
            SupersededError: a later attempt owns the run.
            OSError: the file system is unavailable.
        """
        outcome = Outcome.of_attempt(self.directory, attempt, self._world_size, ranks_end.complaints)
        if ranks_end.refusal:  # its ranks never began
            outcome = Outcome(Reason.FAILED, outcome.step, ranks_end.refusal)
        outcome = outcome.with_suspects(self._nodes_by_rank(attempt, ranks_end), self.allocation.num_nodes)
        outcome = with_memory_advice(self._ask_slurm(attempt, outcome), self.plan.config)
        history = history_with(self.ledger, attempt, outcome)
        # a run that is complete, failed, cancelled or paused (as asha's at a rung) ends; all others continue
        decision = decide(
            history,
            self.plan.slurm.requeue,
            num_attempts_here=self._num_attempts_here,
            suspects=outcome.suspects,
            machine_fault_reported=outcome.suspect_rank is not None,
            spares=self.allocation.spares,
            is_program=self.plan.is_program,
        )
        progress_is_unreported = (
            self.plan.is_program and not reports_steps(history) and decision.action is not Action.END
        )
        if progress_is_unreported and not self._is_warned:
            self._is_warned = True
            log.warning("the program reported no step and no save: %s", NO_PROGRESS_REPORTED)
        if decision.action in (Action.REQUEUE, Action.RESUBMIT):
            # queried again, since the user may have cancelled the job while its ranks saved
            decision = decision.allowed_by(
                self.job.show(), restarts=self.job.slurms_restarts, resubmittable=self.job.resubmittable
            )
        self.ledger.require_ownership(attempt)
        return outcome, decision

    def _nodes_by_rank(self, attempt: int, ranks_end: RanksEnd) -> dict[int, str]:
        if self.allocation.num_nodes == 1:
            return dict.fromkeys(range(self._world_size), self.allocation.step_nodes[0])
        return {**ranks_end.nodes, **nodes_by_rank(self.directory.attempt(attempt))}

    def _ask_slurm(self, attempt: int, outcome: Outcome) -> Outcome:
        """Correct the outcome by SLURM's record: a rank that died while SLURM was ending the job couldn't see why."""
        if not outcome.may_be_slurms_doing(self.ledger, attempt):
            return outcome
        if self.job.cancelled:
            return replace(outcome, reason=Reason.CANCELLED, report="cancelled by its user")
        termination = self.job.cause(outcome)
        if termination is None and outcome.reason is not Reason.FAILED and not outcome.reason.meaning.by_slurm:
            return self._ask_about_nodes(outcome)
        return outcome.explained_by(termination)

    def _ask_about_nodes(self, outcome: Outcome) -> Outcome:
        """Look for failed nodes in a job that outlives them."""
        if not self.allocation.outlives_a_node:
            return outcome
        try:
            failed_nodes = self.job.slurm.failed_nodes(self.job.nodes, self.job.claimed_at)
        except SchedulerError as error:
            log.info("can't query SLURM about the nodes: %s", error)
            return outcome
        failed = tuple(node for node in failed_nodes if node not in self.allocation.lost)
        if not set(failed) & set(self.allocation.step_nodes):
            self.allocation.lose(failed)
            return outcome
        return Outcome(Reason.NODE_FAILURE, outcome.step, f"{' '.join(failed)} failed", suspects=failed)

    def _record(self, attempt: int, outcome: Outcome, decision: RequeueDecision, code: str | None) -> None:
        final = replace(outcome, reason=decision.reason)
        if decision.reason is not outcome.reason:
            # the ranks' own reason would be lost, unless the decision names it
            why_names_reason = outcome.reason.value in decision.why
            ended = outcome.report if why_names_reason else f"{outcome.reason.value}, {outcome.report}"
            final = replace(final, report=f"{decision.why}: {ended}")
        with contextlib.suppress(OSError):  # the next attempt closes this one
            retry(
                lambda: record_end(
                    self.directory,
                    attempt,
                    final,
                    facts=decision.facts(outcome.suspects),
                    world_size=self._world_size,
                    job_id=self.job.job_id,
                    nodes=self.allocation.step_nodes,
                    ends_run=decision.action is Action.END,
                    code=code,
                ),
                on=STORAGE_ERRORS,
                # SLURM will kill this process soon, and it still has to requeue the job
                for_s=0.0 if final.reason.meaning.by_slurm else STORAGE_S,
                problem=f"the end of attempt {attempt} can't be recorded",
            )
        why_names_reason = final.reason.value in decision.why
        why = decision.why if why_names_reason else f"{final.reason.value}: {decision.why}"
        at_step = "" if self.plan.is_program and not final.step else f" at step {final.step}"
        log.info("attempt %d ended%s; %s", attempt, at_step, why)
        if final.report and final.reason is not Reason.COMPLETED:
            print_error(final.report)
            if decision.action is Action.END:
                print_error(resume_advice(self.directory, final.reason))

    def _leave(self, decision: RequeueDecision) -> int:
        """Carry out the decision outside of this allocation.

        A requeue comes last: `scontrol requeue` kills the process that calls it within a tenth of a second. Without
        one, a preempted job whose batch script ends with code 0 in the grace time is over for SLURM. Exit codes that
        make SLURM requeue (RequeueExit) are the site's configuration, not ours.
        """
        exit_code = decision.reason.meaning.exit_code
        requeued = self.job.forbid_early_requeue()
        if decision.action is Action.END:
            if requeued and not self.shares_job:
                self.job.cancel_requeue()
            elif decision.reason is not Reason.CANCELLED:  # that, SLURM doesn't requeue
                self._forbid_requeue(exit_code)
            return exit_code
        if self.job.ends_cancelled:
            log.info("the user cancelled the job meanwhile, so it isn't requeued")
            return ExitCode.CANCELLED
        try:
            if decision.action is not Action.REQUEUE or not self.job.requeue():
                log.info("the run continues in job %s", self.job.resubmit(decision.exclude))
                self._forbid_requeue(ExitCode.INTERRUPTED)
        except HpctrainError as error:
            log.warning(
                "the run can't be continued automatically (%s); to resume: %s", error, resume_command(self.directory)
            )
        return ExitCode.INTERRUPTED

    def _notify(self, attempt: int, outcome: Outcome, decision: RequeueDecision, exit_code: int | None) -> None:
        """Notify of the end of an attempt; before the batch script ends (with this code), wait for the user's command.

        SLURM kills what is left of a job when its batch script ends. While it is ending the job, or has it back in the
        queue, other jobs or this one wait for the nodes, and SIGKILL follows: the command gets a few seconds.
        """
        reason = Reason.CANCELLED if exit_code == ExitCode.CANCELLED else decision.reason
        continuation = "new ranks start in the same job" if exit_code is None else self.job.continuation
        why = ""
        if decision.action is Action.END:  # the job may be requeued for other runs
            continuation = ""
            why = decision.why if decision.why != reason.meaning.why_final else ""
        elif not continuation and reason is not Reason.CANCELLED:
            why = "it can't be continued automatically"
        self.notifier.ended(attempt, replace(outcome, reason=reason), why=why, continuation=continuation)
        if exit_code is not None:
            is_urgent = continuation or reason.meaning.by_slurm or self.shares_job
            self.notifier.finish(SOON_S if is_urgent else None)

    def _forbid_requeue(self, exit_code: int) -> None:
        if not self.shares_job:
            self.job.forbid_requeue(exit_code)

    def _continues_elsewhere(self) -> bool:
        """Whether another job has claimed the run, and not only a second supervisor of this job."""
        with contextlib.suppress(OSError, HpctrainError):
            return self.ledger.attempt(self.ledger.last_claim()).job_id not in (None, self.job.job_id)
        return False

    def _leave_unwritable(self, error: Exception) -> int:
        """Requeue the job because the run directory is unavailable: a later time, or other nodes, may help."""
        print_error(f"hpctrain: {error}; once it can be written again, resume with: {resume_command(self.directory)}")
        has_used_directory = self._num_attempts_here or self.job.restarts
        requeued = has_used_directory and self.job.requeue_unwritable()
        outcome = Outcome(Reason.INFRASTRUCTURE, 0, str(error))
        self.notifier.ended(self.job.attempt, outcome, continuation=self.job.continuation)
        self.notifier.finish(SOON_S)
        if not requeued:
            self._forbid_requeue(ExitCode.FAILED)
        return ExitCode.INTERRUPTED if requeued else ExitCode.FAILED
