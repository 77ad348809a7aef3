"""The attempts of one allocation: srun for the ranks, the judgement of how they ended, and what follows from it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.cluster.nodelist import expand
from hpctrain.config.cluster import Slurm as SlurmCluster
from hpctrain.config.resources import resources_of
from hpctrain.config.root import Config
from hpctrain.errors import ExitCode, HpctrainError, RunDirectoryError, SchedulerError, SupersededError
from hpctrain.launch.allocation import Allocation
from hpctrain.launch.batch_log import say
from hpctrain.launch.conclude import Outcome, close_patiently, completed_by, entry_of, judge_attempt, resume_command
from hpctrain.launch.file_patience import until_it_can
from hpctrain.launch.silent import close_silent_patiently
from hpctrain.launch.step import run_step, srun_command
from hpctrain.launch.taken_away import TakenAway, cancelled_by_user
from hpctrain.launch.way_on import WayOn
from hpctrain.run.directory import RunDirectory
from hpctrain.run.handover import Handover
from hpctrain.run.ledger import Ledger, Reason
from hpctrain.run.requeue import Action, Verdict, decide, unless_cancelled
from hpctrain.scheduler.patience import PATIENCE_S, patiently
from hpctrain.scheduler.slurm import Slurm

TAKEN_AWAY = (Reason.PREEMPTED, Reason.TIME_LIMIT, Reason.NODE_FAILURE, Reason.CANCELLED)
"""Ends after which SLURM kills this process before long."""

T = TypeVar("T")

CLAIM_S = 3.0
"""Seconds that a SIGTERM waits for the first attempt: SLURM may have to be asked how earlier ones ended."""

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
        silence_s: how long SLURM may leave a question without an answer.
    """

    directory: RunDirectory
    config: Config
    environ: Mapping[str, str]
    slurm: Slurm
    patience_s: float = 60.0
    silence_s: float = PATIENCE_S

    def __post_init__(self) -> None:
        """Read this job's place."""
        self.job_id = ClusterEnvironment.from_environment(self.environ).job_id
        self.nodes = expand(self.environ.get("SLURM_JOB_NODELIST", ""))
        self.resources = resources_of(self.config)
        cluster = self.config.cluster
        assert isinstance(cluster, SlurmCluster)
        self.cluster = cluster
        self.allocation = Allocation(tuple(self.nodes), self.resources.num_nodes, cluster.spare_nodes > 0)
        self.ledger = Ledger(self.directory)
        self.restarts = int(self.environ.get("SLURM_RESTART_COUNT", "0"))
        self._attempt_number, self._in_allocation, self._began = 0, 0, time.time()
        self.way_on = WayOn(self.directory, self.config, self.slurm, self.job_id, self.restarts)
        self._claimed, self._claiming = threading.Event(), threading.Lock()
        self._seen, self._looking = False, threading.Lock()
        self._found: TakenAway | None = None

    def run(self) -> int:
        """Run attempts until the verdict leads out of this allocation."""
        world_size = self.resources.world_size
        patience_s = self.patience_s if self.restarts else 0.0
        try:
            close_silent_patiently(patience_s, self.directory, self.slurm, self.job_id, world_size)
            if completed_by(self.ledger, self.job_id):
                log.info("the run in %s is completed: nothing to do", self.directory.path)
                return ExitCode.FINISHED
        except OSError as error:
            log.warning("whether the run is completed can't be told: %s", error)
        while True:
            try:
                attempt, said = self._attempt()
                outcome, verdict, owned = self._judged(attempt, said)
            except (OSError, RunDirectoryError) as error:
                return self._unwritable(error)
            if not owned:
                log.warning("attempt %d was superseded: this job ends here", attempt)
                return ExitCode.INTERRUPTED
            final, suspects = replace(outcome, reason=verdict.reason), self._suspects(outcome)
            if verdict.reason is not outcome.reason:
                final = replace(final, report=f"{verdict.why}: {outcome.report}")
            told = {"job_id": self.job_id, "nodes": self.allocation.step_nodes, **verdict.told(suspects)}
            if outcome.error_after_signal:
                told["error_after_signal"] = True
            patience_s = 0.0 if final.reason in TAKEN_AWAY else self.patience_s
            close_patiently(patience_s, self.directory, attempt, world_size, final, **told)
            log.info("attempt %d ended: %s at step %d; %s", attempt, final.reason.value, final.step, verdict.why)
            if final.report:
                hint = f"; to go on: {resume_command(self.directory)}" if verdict.action is Action.END else ""
                say(f"{final.report}{hint}")
            if verdict.action is not Action.RESTART:
                return self._leave(verdict, final)
            self.allocation.lose(verdict.exclude)

    def _claim(self) -> int:
        self._began = time.time()  # before the claim: a cancel may follow it at once
        with self._claiming:
            self._attempt_number = self.ledger.claim()
        self._claimed.set()
        return self._attempt_number

    def _attempt(self) -> tuple[int, str]:
        """Its number, and what srun said of its ranks' ends."""
        # where the run has been before, its directory was good
        patience_s = self.patience_s if self._in_allocation or self.restarts else 0.0
        attempt = until_it_can(self._claim, patience_s, "the run can't be claimed yet")
        self._in_allocation += 1
        nodes, keeps_spares = self.allocation.step_nodes, self.allocation.keeps_spares
        log.info("attempt %d on %s", attempt, " ".join(nodes))
        variables = Handover(attempt=attempt, logged=True).variables()
        command = srun_command(self.config, self.directory, nodes if keeps_spares else ())
        environ = {**self.environ, **variables}
        end = run_step(command, environ, ends_with_a_node=keeps_spares, aborted=self._look_beside)
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
        if self._in_allocation or self.restarts:
            budget = self.cluster.requeue.max_failures
            if self.way_on.requeue_for_its_files(budget, self.silence_s):
                return ExitCode.INTERRUPTED
        return ExitCode.FAILED

    def _second_opinion(self, outcome: Outcome) -> Outcome:
        """Ranks that died while SLURM took their job away can't tell, and new ones would not be told again."""
        failed = outcome.reason is Reason.FAILED
        if outcome.reason in (Reason.COMPLETED, Reason.CANCELLED) or (
            failed and not self._may_follow_a_signal(outcome)
        ):
            return outcome
        if cancelled_by_user(self.directory, self._began):
            return replace(outcome, reason=Reason.CANCELLED, report="cancelled by its user")
        with self._looking:  # once the job is requeued, SLURM's record no longer tells a time limit from a preemption
            found = self._found
            if found is None and outcome.reason not in TAKEN_AWAY:
                found = self._taken_away(outcome.stop_signal)
        if found is None:
            return (
                self._without_failed_nodes(outcome) if outcome.reason not in (*TAKEN_AWAY, Reason.FAILED) else outcome
            )
        report = f"{found.reason.value}: {found.evidence}"
        if failed:
            report += f"; an error followed, as of a child process that the signal ended: {outcome.report}"
        outcome = replace(outcome, reason=found.reason, report=report, suspect_rank=None, silent_ranks=())
        return replace(outcome, error_after_signal=failed)

    def _may_follow_a_signal(self, outcome: Outcome) -> bool:
        """Whether an error may be that of a child process which SLURM's signal ended; not twice in a row."""
        before = [one for one in self.ledger.attempts() if one.attempt < self._attempt_number]
        return outcome.stop_signal is not None and not (before and before[-1].extra.get("error_after_signal"))

    def _without_failed_nodes(self, outcome: Outcome) -> Outcome:
        """A job with nodes to spare goes on when one of them fails."""
        if not self.allocation.keeps_spares:
            return outcome
        try:
            failed = self.slurm.failed_nodes(self.nodes, self._began)
        except SchedulerError as error:
            log.info("SLURM doesn't tell of the nodes: %s", error)
            return outcome
        if not set(failed) & set(self.allocation.step_nodes):
            self.allocation.lose(failed)
            return outcome
        return Outcome(Reason.NODE_FAILURE, outcome.step, f"{' '.join(failed)} failed", suspects=failed)

    def _taken_away(self, received: int | None = None) -> TakenAway | None:
        if self.job_id is None:
            return None
        ask = partial(TakenAway.ask, self.slurm, self.job_id, self.nodes, restarts=self.restarts, since=self._began)
        return self._answer(lambda: ask(received=received))

    def _answer(self, question: Callable[[], T | None]) -> T | None:
        def ask() -> T | None:
            # a batch host that is cut off may outlive its job, and would ask in vain for as long as it is allowed to
            with self._claiming, contextlib.suppress(OSError):  # not to be told isn't to be overtaken
                if self._claimed.is_set():
                    self.ledger.require_ownership(self._attempt_number)
            return question()

        try:
            return patiently(ask, self.silence_s)
        except SupersededError:
            return None
        except SchedulerError as error:
            log.info("SLURM could not be asked about the job: %s", error)
            return None

    def heed(self, bell: int) -> None:
        """At each SIGTERM among the signals' numbers from ``bell``, look whether the job is being killed.

        Args:
            bell: gives a byte per signal; its end is the end.
        """
        while numbers := os.read(bell, 64):
            for number in numbers:
                log.info("%s noted", signal.Signals(number).name)
            if signal.SIGTERM in numbers:
                self.look()

    def look(self) -> None:
        """Look whether the job is being killed, and if so ask for its requeue at once; from any thread.

        Neither the ranks nor this process may live until all is saved and judged. SLURM lets them go on until KillWait
        is over all the same, and starts the job anew when all of its processes are gone (seen on 22.05).
        """
        with self._looking:
            if self._seen:
                return
            self._claimed.wait(CLAIM_S)  # an attempt's end can be told; without one, this is the next best
            try:
                self._seen = self._see_whether_it_ends()
            except (HpctrainError, OSError) as error:
                log.warning("whether SLURM ends the job could not be seen to: %s", error)

    def _look_beside(self) -> None:
        """On srun's word that the step is being ended: it comes with the SIGTERM, and from elsewhere in SLURM."""
        threading.Thread(target=self.look, daemon=True).start()

    def _see_whether_it_ends(self) -> bool:
        """Whether it does, and all that follows for this attempt was done."""
        claimed = self._claimed.is_set()
        found = self._taken_away()
        if found is None or not found.killing:
            return False
        if cancelled_by_user(self.directory, self._began):
            found = replace(found, reason=Reason.CANCELLED)
        log.info("SLURM ends the job: %s (%s)", found.reason.value, found.evidence)
        self._found = found
        if found.reason is Reason.CANCELLED:
            self.way_on.cancel()
        if not claimed:
            if found.reason is Reason.PREEMPTED and not found.requeued:
                self.way_on.requeue_early(self.silence_s)
            return False
        with contextlib.suppress(OSError):  # the requeue matters more
            found.write(self.directory.claim(self._attempt_number))
        if found.requeued or found.reason not in (Reason.PREEMPTED, Reason.TIME_LIMIT):
            return True
        outcome = Outcome(found.reason, self.directory.saved_step, "")
        if self._verdict(self._attempt_number, outcome).action is not Action.REQUEUE:
            return True
        return self.way_on.requeue_early(self.silence_s)

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
        if verdict.action not in (Action.REQUEUE, Action.RESUBMIT) or self.job_id is None:
            return verdict
        job_id = self.job_id
        record = self._answer(lambda: self.slurm.show(job_id))
        verdict = unless_cancelled(verdict, record, restarts=self.restarts)
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
            if verdict.action is not Action.REQUEUE or not self.way_on.requeue(self.silence_s):
                log.info("the run goes on in job %s", self.way_on.resubmit(verdict.exclude))
        except HpctrainError as error:
            log.warning("the run could not go on by itself (%s); to go on: %s", error, resume_command(self.directory))
        return ExitCode.INTERRUPTED

    def _take_back(self) -> None:
        """The job was requeued before its ranks had ended, and they left nothing to go on with."""
        assert self.job_id is not None
        job_id = self.job_id
        try:
            patiently(lambda: self.slurm.cancel(job_id), self.silence_s)
        except SchedulerError as error:
            log.warning("the run is over, and job %s waits in the queue all the same (%s); scancel it", job_id, error)
