"""The training loop: steps, and the logging, evaluation, saves and stops between them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from typing import TextIO

from hpctrain.attempt.outcome import train_further_command
from hpctrain.data.micro_batch import MicroBatch
from hpctrain.metrics.progress import Bar
from hpctrain.rank.agreement import Decision, StopWhileLoading
from hpctrain.rank.stop_request import Stop
from hpctrain.rank.world import World
from hpctrain.run.config_change import keep_config
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Claim
from hpctrain.run.times import Times
from hpctrain.train.checkpointing import Checkpointing, StartPoint
from hpctrain.train.divergence import Divergence
from hpctrain.train.evaluation import check_evaluation
from hpctrain.train.profiling.profiler import Profiler
from hpctrain.train.stopping import Stopping
from hpctrain.train.training import Training
from hpctrain.train.training_log import TrainingLog

log = logging.getLogger("hpctrain.train")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptContext:
    """The attempt in which a training runs: its ownership of the run, its stop, its times and its outputs.

    Attributes:
        claim: of the attempt.
        stopping: decides how the ranks stop, and whether they save.
        times: counts the attempt's seconds by kind of work.
        hosts: of all ranks, in rank order, on rank zero; None on the other ranks.
        log_stream: the rank's log, if standard output doesn't go there already.
        bar: shows the progress on a terminal; None for plain lines, and on the other ranks.
    """

    claim: Claim
    stopping: Stopping
    times: Times
    hosts: list[str] | None
    log_stream: TextIO | None = None
    bar: Bar | None = None

    @property
    def directory(self) -> RunDirectory:
        """Of the run."""
        return self.claim.ledger.directory

    def require_ownership(self, world: World) -> None:
        """Raise on rank zero if the attempt is superseded.

        Raises:
            SupersededError: a later attempt owns the run.
        """
        if world.is_rank_zero:
            self.claim.require_ownership()

    def sharing_terminal(self) -> AbstractContextManager[None]:
        """Return a context in which the bar makes room for what others print."""
        if self.bar is None:
            return nullcontext()
        return self.bar.sharing_terminal(logging.getLogger("hpctrain").handlers)


@dataclass(eq=False)
class Loop:
    """Trains from a step to the last one, or until the ranks agree to stop.

    The watchdog and the exit record of this rank read how far it is.

    Attributes:
        training: what is trained.
        attempt: in which it trains.
        start_point: where the attempt starts.
        profiler: runs the steps that are measured.
        log: writes the metrics.
        checkpointing: saves.
        divergence: raises once training has diverged.
        step: completed steps.
        why_ended: why the run was completed before its last step; empty if it wasn't.
    """

    training: Training
    attempt: AttemptContext
    start_point: StartPoint
    _: KW_ONLY
    profiler: Profiler
    log: TrainingLog
    checkpointing: Checkpointing
    divergence: Divergence
    why_ended: str = field(default="", init=False)
    _ends: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.step = self.start_point.step
        self._stopping = self.attempt.stopping
        self._times = self.attempt.times
        self._evaluation = self.training.evaluation
        self._ending = self.training.ending
        self._callbacks = self.training.callbacks
        self._evaluation_due = self.start_point.evaluation_due

    @property
    def progress(self) -> object:
        """A value that changes after each step and each evaluated batch."""
        return self.step, 0 if self._evaluation is None else self._evaluation.num_batches

    def finish_save_within(self, seconds: float) -> None:
        """Wait for a checkpoint that is being written, but no longer than ``seconds``; after an error."""
        self.checkpointing.saver.finish_within(seconds)

    def start(self, *, try_out: bool) -> bool:
        """Try out the evaluation, and agree whether to stop before the first step; collective.

        Args:
            try_out: whether to evaluate a few batches, so that a mistake shows at once.

        Returns:
            Whether to train; if not, the ranks stop.

        Raises:
            TaskError: the task's evaluation broke its contract.
            ConfigError: the evaluation doesn't return `checkpoint.metric`.
        """
        stop = self._stopping.agreement.agree_and_calibrate()
        if stop is None and try_out:
            with self._times.during("eval_s"):
                stop = check_evaluation(self.training, self._stopping.agreement)
        if stop is None:
            return True
        # only to find the cause: there is nothing new to save since the checkpoint from which this attempt started
        self._stopping.begin(stop, self.checkpointing.saver.estimated_save_s)
        return False

    def run(self, micro_batches: Iterator[MicroBatch]) -> bool:
        """Run the remaining steps, after `start`; collective.

        Args:
            micro_batches: of the remaining steps.

        Returns:
            Whether the last step was reached.
        """
        if self.checkpointing.is_at_end(self.step):
            # an earlier version may have saved the last checkpoint unchecked
            self.divergence.require_finite_weights(self.step)
        self._callbacks.start(self.training, self.attempt.directory)
        self._ending.begin()
        if self._stopped_in_pending_evaluation():
            return False
        if self._ends_before_a_step():
            return self._end_early()
        if self._pauses():
            # this step is saved already: a stop kept the previous attempt from pausing here
            return self._pause()
        self._ending.reopen()
        try:
            return self._run_steps(micro_batches)
        except StopWhileLoading:
            # save inside the handler: the error keeps the loading processes alive, whose end would delay the save
            return self._leave_before_step()

    def _run_steps(self, micro_batches: Iterator[MicroBatch]) -> bool:
        # look names up once, not in each step: a small model's step takes a fraction of a millisecond
        config, total = self.training.config, self.training.total_steps
        log_every, save_every = config.logger.every_steps, config.checkpoint.every_steps
        eval_every = config.trainer.eval_every_steps or self.training.data.plan.steps_per_epoch
        train_step, profiler, checkpointing = self.training.step, self.profiler, self.checkpointing
        position, show_step = self.training.position, self.log.show_step
        decide, clock = self._stopping.agreement.decide, checkpointing.clock
        callbacks, ending, meter = self._callbacks, self._ending, self.training.meter
        before_step, after_step = callbacks.hooks["before_step"], callbacks.hooks["after_step"]
        is_timed = ending.is_timed
        pause_at = total if self._stopping.pause_at is None else self._stopping.pause_at
        first = self.step + 1
        while self.step < total:
            if before_step:
                callbacks.run(before_step, meter, computing=True)
            if self.step == profiler.next_step:
                profiler.do_step(self.step, micro_batches)
            else:
                train_step(self.step, micro_batches)
            self.step = position.step = step = self.step + 1
            if show_step is not None:
                show_step(step)
            is_last = step == total
            if step == first:
                self._times.first_step_done(step)
                # before any record of it is written
                checkpointing.require_constant_buffers()
                self._keep_config()
            if after_step:
                callbacks.run(after_step, meter)
            if is_last or step % log_every == 0:
                self.divergence.check(step, self.log.training(step))
            # before the agreement: a stop that interrupts the evaluation was agreed upon in it
            if (is_last or step % eval_every == 0) and (stop := self._evaluate()):
                return self._leave(stop)
            if is_timed:
                ending.check_max_time()
            decision = decide(step, save=clock() >= checkpointing.due_at_s, end=ending.requested)
            # after the last step there is nothing to stop: the run is complete once it is saved
            pauses = step >= pause_at and self._pauses()
            if not is_last and (decision.stop or decision.end or self._ends or pauses):
                return self._stop_here(decision)
            every = save_every is not None and step % save_every == 0
            save_due = is_last or every or decision.save or step == checkpointing.best_step
            if save_due and (stop := self._save(wait=is_last)):
                return self._leave(stop)
        return True

    def conclude(self, *, finished: bool) -> None:
        """Log how the attempt ended, and call the last hooks, once everything is saved."""
        if self.step > self.start_point.step:
            self._keep_config()  # again, in case the file system failed after the first step
        if finished:
            self.training.data.loss_weights.check_end(self.step)
        if self.why_ended:
            log.info("to train further: %s", train_further_command(self.attempt.directory, self.why_ended))
        self.profiler.finish(self.step)
        if finished:
            self.log.complete()
        # last: an error in a callback must not keep anything above from being written, and at a stop the time until the
        # kill belongs to the checkpoint
        self._callbacks.run_between_steps("on_end" if finished else "on_stop")

    def _keep_config(self) -> None:
        """Keep a resume's change to the configuration, once a step was trained with it."""
        if self.training.world.is_rank_zero:
            self.attempt.claim.require_ownership()
            keep_config(self.attempt.directory, self.start_point.step)

    def _ends_before_a_step(self) -> bool:
        """Whether the run ends without another step: it has ended early before, or its time is over; collective."""
        if self.step in (0, self.training.total_steps):
            return False
        if self._ending.is_timed:
            self._ending.check_max_time()
        return self._ending.agree()

    def _end_early(self) -> bool:
        """End the run: evaluate and save this step if necessary; return whether the run is complete; collective."""
        step, ending = self.step, self._ending
        ending.agree()
        log.info("step %d: the run ends here: %s", step, ending.reason)
        if not ending.concluded:
            # a stop in the evaluation below may have interrupted an earlier attempt after this record: don't repeat it
            if step % self.training.config.logger.every_steps and ending.recorded_step != step:
                ending.note_record(step)
                self.divergence.check(step, self.log.training(step))
            if ending.evaluated_step != step and (stop := self._evaluate()):
                return self._leave(stop)
            ending.conclude()
            self._save(wait=True)
        self.why_ended = ending.reason
        return True

    def _stop_here(self, decision: Decision) -> bool:
        """Leave for an agreed stop, or else end the run early, or else pause it; return whether it is complete."""
        if decision.stop:
            return self._leave(decision.stop)
        if decision.end or self._ends:
            return self._end_early()
        self._save(wait=True)
        return self._pause()

    def _stopped_in_pending_evaluation(self) -> bool:
        """Run and save the evaluation that the previous attempt left, if any; return whether a stop interrupted it."""
        if not self._evaluation_due:
            return False
        if stop := self._evaluate():
            self._leave(stop)
            return True
        # the checkpoint of this step lacks its score, and the states that callbacks have after the evaluation
        self._save(wait=self.step == self.training.total_steps)
        return False

    def _pauses(self) -> bool:
        """Whether the run pauses at this step: `trainer.pause_at_step` is reached, and the step is evaluated."""
        pause_at = self._stopping.pause_at
        if pause_at is None or not pause_at <= self.step < self.training.total_steps:
            return False
        return self._evaluation is None or self._ending.evaluated_step == self.step

    def _pause(self) -> bool:
        """Pause the run, which is already saved; return False, since it isn't complete."""
        self._stopping.pause(self.step)
        return False

    def _leave_before_step(self) -> bool:
        """Leave because the ranks stop while they wait for the step's first micro-batch; collective."""
        stop = self._stopping.agreement.agree_on_stop()
        assert stop is not None
        if self.step > self.start_point.step:
            return self._leave(stop)
        # there is nothing new to save
        self._stopping.begin(stop, self.checkpointing.saver.estimated_save_s)
        return False

    def _leave(self, stop: Stop) -> bool:
        """Save if there is time; return False, since the run isn't complete."""
        if self._stopping.begin(stop, self.checkpointing.saver.estimated_save_s):
            self._save(wait=True)
        return False

    def _save(self, *, wait: bool) -> Stop | None:
        """Save; if a stop comes while this save waits for an earlier one, skip it and return the stop."""
        with self._times.during("save_s"):
            self.profiler.before_save(self.step)
            # flush before the checkpoint is published: a resume from it must find every record up to its step
            self.log.flush()
            self.divergence.check_before_save(self.step, ends_run=self.checkpointing.is_at_end(self.step))
            stop = self.checkpointing.save(self.step, evaluation_due=self._evaluation_due, wait=wait)
            if self.checkpointing.copied_step == self.step:
                self._callbacks.run_between_steps("after_save")
        self._times.record(self.step, force=True)
        return stop

    def _evaluate(self) -> Stop | None:
        """Evaluate and log; if a stop abandons the evaluation, it stays due: return the stop."""
        if self._evaluation is None:
            return None
        with self._times.during("eval_s"):
            self.profiler.before_evaluation(self.step)
            evaluated = self._evaluation(self._stopping.agreement)
        self._evaluation_due = evaluated.stop is not None
        if evaluated.stop is None:
            self._follow_evaluation(evaluated.means)
        return evaluated.stop

    def _follow_evaluation(self, means: Mapping[str, float]) -> None:
        self._ending.note_evaluation(self.step)
        logged: Mapping[str, float] = {}
        if self._callbacks.hooks["after_evaluation"]:
            with self._times.during("eval_s"):
                logged = self._callbacks.run_after_evaluation(self.training.world, means)
        self.log.evaluation(self.step, {**means, **logged})
        self.checkpointing.record_evaluation(self.step, means)
        # at once, and not by the agreement, which takes some steps: an interrupted run has to end at the same step
        self._ends = bool(self._callbacks.hooks["after_evaluation"]) and self._ending.agree()
