"""The attempts of one allocation: srun for the ranks, the judgement of how they ended, and what follows from it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hpctrain.attempt.outcome import Outcome, close_patiently, completed_by, entry_of, judge_attempt, resume_command
from hpctrain.attempt.requeue import Action, Verdict, decide, unless_cancelled
from hpctrain.attempt.unrecorded import close_silent_patiently
from hpctrain.config.cluster import Slurm as SlurmCluster
from hpctrain.config.resources import resources_of
from hpctrain.config.root import Config
from hpctrain.errors import ExitCode, HpctrainError, RunDirectoryError, SchedulerError
from hpctrain.retry import until_it_can
from hpctrain.run.directory import RunDirectory
from hpctrain.run.handover import Handover
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason
from hpctrain.scheduler.patience import patiently
from hpctrain.scheduler.slurm import Slurm
from hpctrain.supervise.allocation import Allocation
from hpctrain.supervise.batch_log import say
from hpctrain.supervise.lookout import Lookout
from hpctrain.supervise.step import run_step, srun_command
from hpctrain.supervise.this_job import ThisJob
from hpctrain.supervise.way_on import WayOn

log = logging.getLogger("hpctrain.launch")


@dataclass
class Supervisor:
    """The attempts of one allocation.

    Args:
        directory: the run.
        config: its configuration.
        environ: the batch script's environment.
        slurm: who is asked, and who requeues.
        patience_s: how long a file system may refuse that an end is recorded.

    Attributes:
        job: around this process.
        lookout: is told of SIGTERMs.
    """

    directory: RunDirectory
    config: Config
    environ: Mapping[str, str]
    slurm: Slurm
    patience_s: float = 60.0

    def __post_init__(self) -> None:
        """Read this job's place."""
        self.job = ThisJob(self.directory, self.slurm, self.environ)
        self.resources = resources_of(self.config)
        cluster = self.config.cluster
        assert isinstance(cluster, SlurmCluster)
        self.cluster = cluster
        self.allocation = Allocation(self.job.nodes, self.resources.num_nodes, cluster.spare_nodes > 0)
        self.ledger = Ledger(self.directory)
        self._in_allocation = 0
        self.way_on = WayOn(self.directory, self.config, self.slurm, self.job.job_id, self.job.restarts)
        self.lookout = Lookout(self.job, self.way_on, self._goes_back)

    def run(self) -> int:
        """Run attempts until the verdict leads out of this allocation."""
        world_size = self.resources.world_size
        patience_s = self.patience_s if self.job.restarts else 0.0
        try:
            close_silent_patiently(patience_s, self.directory, self.slurm, self.job.job_id, world_size)
            if completed_by(self.ledger, self.job.job_id):
                log.info("the run in %s is completed: nothing to do", self.directory.path)
                return ExitCode.FINISHED
        except OSError as error:
            log.warning("whether the run is completed can't be told: %s", error)
        while True:
            try:
                attempt, said = self._attempt()
            except RunDirectoryError as error:
                return self._unwritable(error)
            try:
                outcome, verdict, owned = self._judged(attempt, said)
            except (OSError, RunDirectoryError) as error:
                return self._unwritable(error)
            if not owned:
                log.warning("attempt %d was superseded: this job ends here", attempt)
                return ExitCode.INTERRUPTED
            final, suspects = replace(outcome, reason=verdict.reason), self._suspects(outcome)
            if verdict.reason is not outcome.reason:
                final = replace(final, report=f"{verdict.why}: {outcome.report}")
            told = {"job_id": self.job.job_id, "nodes": self.allocation.step_nodes, **verdict.told(suspects)}
            if outcome.error_after_signal:
                told["error_after_signal"] = True
            patience_s = 0.0 if final.reason.meaning.by_slurm else self.patience_s
            close_patiently(patience_s, self.directory, attempt, world_size, final, **told)
            log.info("attempt %d ended: %s at step %d; %s", attempt, final.reason.value, final.step, verdict.why)
            if final.report:
                hint = f"; to go on: {resume_command(self.directory)}" if verdict.action is Action.END else ""
                say(f"{final.report}{hint}")
            if verdict.action is not Action.RESTART:
                return self._leave(verdict, final)
            self.allocation.lose(verdict.exclude)

    def _attempt(self) -> tuple[int, str]:
        """Its number, and what srun said of its ranks' ends."""
        # where the run has been before, its directory was good
        patience_s = self.patience_s if self._in_allocation or self.job.restarts else 0.0
        attempt = until_it_can(self.job.claim, patience_s, "the run can't be claimed yet")
        self._in_allocation += 1
        nodes, keeps_spares = self.allocation.step_nodes, self.allocation.keeps_spares
        log.info("attempt %d on %s", attempt, " ".join(nodes))
        variables = Handover(attempt=attempt, logged=True).variables()
        command = srun_command(self.config, self.directory, nodes if keeps_spares else ())
        environ = {**self.environ, **variables}
        end = run_step(command, environ, ends_with_a_node=keeps_spares, aborted=self.lookout.look_beside)
        log.info("srun ended with %d", end.code)
        return attempt, "; ".join(end.said)

    def _judged(self, attempt: int, said: str) -> tuple[Outcome, Verdict, bool]:
        """How an attempt ended, what follows, and whether that is still this job's to say."""

        def judged() -> tuple[Outcome, Verdict, bool]:
            outcome = self._second_opinion(judge_attempt(self.directory, attempt, self.resources.world_size, said))
            verdict = self._as_possible(self._verdict(attempt, outcome))
            return outcome, verdict, self.ledger.owns(attempt)

        return until_it_can(judged, self.patience_s, f"how attempt {attempt} ended can't be read yet")

    def _unwritable(self, error: Exception) -> int:
        """Nothing can be read or written here: the queue may give the file system time, or other nodes."""
        say(f"hpctrain: {error}; to go on: {resume_command(self.directory)}")
        if self._in_allocation or self.job.restarts:
            budget = self.cluster.requeue.max_failures
            if self.way_on.requeue_for_its_files(budget, self.job.silence_s):
                return ExitCode.INTERRUPTED
        return ExitCode.FAILED

    def _second_opinion(self, outcome: Outcome) -> Outcome:
        """Ranks that died while SLURM took their job away can't tell, and new ones would not be told again."""
        failed = outcome.reason is Reason.FAILED
        if outcome.reason in (Reason.COMPLETED, Reason.CANCELLED):
            return outcome
        if failed and not self._may_follow_a_signal(outcome):
            return outcome
        if self.job.cancelled:
            return replace(outcome, reason=Reason.CANCELLED, report="cancelled by its user")
        found = self.lookout.why(outcome.reason, outcome.stop_signal)
        if found is None:
            return outcome if failed or outcome.reason.meaning.by_slurm else self._without_failed_nodes(outcome)
        if found.reason is outcome.reason:
            return outcome
        report = f"{found.reason.value}: {found.evidence}"
        if failed:
            report += f"; an error followed, as of a child process that the signal ended: {outcome.report}"
        outcome = replace(outcome, reason=found.reason, report=report, suspect_rank=None, silent_ranks=())
        return replace(outcome, error_after_signal=failed)

    def _may_follow_a_signal(self, outcome: Outcome) -> bool:
        """Whether an error may be that of a child process which a signal of SLURM's ended; not twice in a row."""
        before = [one for one in self.ledger.attempts() if one.attempt < self.job.attempt]
        return outcome.stop_signal is not None and not (before and before[-1].extra.get("error_after_signal"))

    def _without_failed_nodes(self, outcome: Outcome) -> Outcome:
        """A job with nodes to spare goes on when one of them fails."""
        if not self.allocation.keeps_spares:
            return outcome
        try:
            failed = self.slurm.failed_nodes(self.job.nodes, self.job.began)
        except SchedulerError as error:
            log.info("SLURM doesn't tell of the nodes: %s", error)
            return outcome
        if not set(failed) & set(self.allocation.step_nodes):
            self.allocation.lose(failed)
            return outcome
        return Outcome(Reason.NODE_FAILURE, outcome.step, f"{' '.join(failed)} failed", suspects=failed)

    def _goes_back(self, reason: Reason) -> bool:
        """Whether the newest attempt leads back to the queue, ended for this reason with what is saved."""
        outcome = Outcome(reason, self.directory.saved_step, "")
        return self._verdict(self.job.attempt, outcome).action is Action.REQUEUE

    def _verdict(self, attempt: int, outcome: Outcome) -> Verdict:
        earlier = [entry for entry in self.ledger.attempts() if entry.attempt < attempt]
        this = replace(
            entry_of(self.ledger, attempt),
            reason=outcome.reason,
            end_step=outcome.step,
            extra={"saved_step": self.directory.saved_step},
        )
        if this.start_step is None:
            this = replace(this, start_step=self.directory.saved_step)
        return decide(
            [*earlier, this],
            self.cluster.requeue,
            in_allocation=self._in_allocation,
            suspects=self._suspects(outcome),
            said_so=outcome.suspect_rank is not None,
            spares=self.allocation.spares,
        )

    def _as_possible(self, verdict: Verdict) -> Verdict:
        """A requeue must come after all is written down: what follows has to be known before."""
        if verdict.action not in (Action.REQUEUE, Action.RESUBMIT) or self.job.job_id is None:
            return verdict
        record = self.job.record()
        verdict = unless_cancelled(verdict, record, restarts=self.job.restarts)
        if verdict.action is not Action.REQUEUE or record is None or record.requeue is not False:
            return verdict
        why = f"{verdict.why}, by way of a new job, since SLURM may not requeue this one"
        return replace(verdict, action=Action.RESUBMIT, why=why)

    def _suspects(self, outcome: Outcome) -> tuple[str, ...]:
        per_node = self.resources.processes_per_node
        if outcome.suspect_rank is not None:
            # by SLURM's name: the host's own may be another one, and nothing to exclude
            return (self.allocation.step_nodes[outcome.suspect_rank // per_node],)
        return outcome.suspects or self.allocation.of_ranks(outcome.silent_ranks, per_node)

    def _leave(self, verdict: Verdict, outcome: Outcome) -> int:
        if outcome.reason is Reason.COMPLETED:
            return outcome.exit_code
        requeued = self.way_on.decided()
        if verdict.action is Action.END:
            if requeued:
                self._take_back()
            return outcome.exit_code
        if self.way_on.cancelled:
            log.info("the user has cancelled the job meanwhile: it isn't requeued")
            return ExitCode.CANCELLED
        try:
            if verdict.action is not Action.REQUEUE or not self.way_on.requeue(self.job.silence_s):
                log.info("the run goes on in job %s", self.way_on.resubmit(verdict.exclude))
        except HpctrainError as error:
            log.warning("the run could not go on by itself (%s); to go on: %s", error, resume_command(self.directory))
        return ExitCode.INTERRUPTED

    def _take_back(self) -> None:
        """The job was requeued before its ranks had ended, and they left nothing to go on with."""
        job_id = self.job.job_id
        assert job_id is not None
        try:
            patiently(lambda: self.slurm.cancel(job_id), self.job.silence_s)
        except SchedulerError as error:
            log.warning("the run is over, and job %s waits in the queue all the same (%s); scancel it", job_id, error)
