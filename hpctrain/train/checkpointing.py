"""Save and resume a training: decide when to save, collect the state, and restore it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from torch import nn

from hpctrain.checkpoint.best import Best
from hpctrain.checkpoint.read import LoadedCheckpoint, load_newest
from hpctrain.checkpoint.retention import quarantine
from hpctrain.checkpoint.saver import CheckpointSaver, auto_interval_s
from hpctrain.checkpoint.state import Head, LiveState, states_of
from hpctrain.config.root import config_digest
from hpctrain.errors import CheckpointError, SupersededError
from hpctrain.rank.agreement import Agreement
from hpctrain.rank.determinism import random_states_restored
from hpctrain.rank.stop_request import Stop
from hpctrain.run.checkpoints import ShowRead
from hpctrain.run.directory import RunDirectory
from hpctrain.run.evaluation import EvaluationRecord
from hpctrain.run.gone_checkpoints import copy_records_aside, recorded_step
from hpctrain.run.ledger import Claim, Ledger
from hpctrain.train.training import Training
from hpctrain.train.training_state import ABSENT, WeightsState, training_state

FIRST_AUTO_SAVE_S = 60.0
"""Seconds until the first save with checkpoint.auto: early, because the cost of a save has to be measured."""

WAIT_S = 0.2
"""Seconds between two checks for a stop, while a save waits for an earlier one."""

log = logging.getLogger("hpctrain.train")


@dataclass(frozen=True, slots=True)
class StartPoint:
    """Start of an attempt: in a new run, or after a checkpoint.

    Attributes:
        step: completed steps; 0 in a new run.
        evaluation_due: whether the checkpoint was written before the evaluation of its step was done.
        resumed_world_size: number of ranks that wrote the checkpoint; None in a new run.
    """

    step: int = 0
    evaluation_due: bool = False
    resumed_world_size: int | None = None


@dataclass(eq=False)
class Checkpointing:
    """Saves the state of a training, and restores it from the newest intact checkpoint.

    Attributes:
        training: is saved and restored.
        directory: of the run.
        saver: writes the checkpoints.
        agreement: the ranks agree by it to stop while a save waits for another one.
        claim: of this attempt.
        clock: monotonic seconds.
        best_step: the step of the last evaluation that was among the best; a save follows it.
        copied_step: the step of the last checkpoint that was copied, even if it is still being written.
        due_at_s: when the next save is due by rank zero's clock; infinite if none is, and on the other ranks.
    """

    training: Training
    directory: RunDirectory
    saver: CheckpointSaver
    _: KW_ONLY
    agreement: Agreement
    claim: Claim
    clock: Callable[[], float] = time.monotonic
    best_step: int | None = field(default=None, init=False)
    copied_step: int | None = field(default=None, init=False)
    due_at_s: float = field(default=math.inf, init=False)

    def __post_init__(self) -> None:
        self._world = self.training.world
        policy, task = self.training.config.checkpoint, self.training.task
        self._best = Best.configured(policy, task.metric, task.metric_mode, self.directory)
        self._weights = WeightsState(self.training)
        self._state = training_state(self.training, self._best, self._weights)

    def resume(self, show: ShowRead | None = None) -> StartPoint:
        """Restore the newest intact checkpoint, if there is one; collective.

        Args:
            show: called on rank zero while it reads the checkpoint.

        Raises:
            SupersededError: a later attempt owns the run. Only rank zero raises it.
            CheckpointError: a checkpoint belongs to another training, or all were removed after the training was built.
            TaskError: the task's state can't be saved.
        """
        if self._world.is_rank_zero:
            self.claim.require_ownership()
        checkpoint = load_newest(self.directory, self._world, show)
        if checkpoint is None and self.training.resumes:
            raise CheckpointError(
                f"{self.directory.checkpoints} had checkpoints when this attempt started, and has none any more: put "
                "one back, or start a new run"
            )
        # a state that can't be saved is an error now, and not at the first save
        self.training.task_state.check()
        self.training.callbacks.check()
        if checkpoint is not None:
            if self._world.is_rank_zero:
                quarantine(checkpoint.passed_over, self.claim)
                if checkpoint.step < recorded_step(self.directory):
                    folder = copy_records_aside(self.directory, self.claim.attempt)
                    log.warning("the metrics after step %d are dropped; %s has a copy", checkpoint.step, folder)
            self._restore(checkpoint)
        step = 0 if checkpoint is None else checkpoint.step
        # building and trying out the replicas draws from the random streams that were just restored
        with nullcontext() if checkpoint is None else random_states_restored(self._world.gpus):
            self.training.step.prepare(step)
        average = {} if self.training.ema is None else self.training.ema.state()
        self.saver.lock_ahead(self._live_state(step, **self._weights.state(), **average))
        if checkpoint is not None and self._world.is_rank_zero:
            self.saver.retain_in_background(checkpoint.step)
        self._schedule_next_save()
        if checkpoint is None:
            return StartPoint()
        return StartPoint(step, bool(checkpoint.extra.get("evaluation_due", False)), checkpoint.world_size)

    def _restore(self, checkpoint: LoadedCheckpoint) -> None:
        saved = checkpoint.states
        for part in self._state:
            part.load_state(saved)
        if self._world.is_rank_zero:
            log.info("resuming at step %d from %s", checkpoint.step, checkpoint.path)

    def record_evaluation(self, step: int, means: Mapping[str, float]) -> None:
        """Compare an evaluation with the best so far, and set `best_step` if it is one of them; collective.

        Rank zero writes it into the attempt's folder (`run.evaluation`), where a search reads it.

        Args:
            step: completed steps.
            means: by logged name; the same on every rank.

        Raises:
            ConfigError: the metric that ranks the best checkpoints isn't among them.
        """
        for update in self.training.step.updates:
            update.learning_rate.after_evaluation(step, means)
        among_the_best = self._best is not None and self._best.update(step, means)
        if self._world.is_rank_zero:
            self._write_evaluation(step, means)
        if self.training.checkpoint_policy.keep_best and self._world.broadcast(among_the_best):
            self.best_step = step

    def _write_evaluation(self, step: int, means: Mapping[str, float]) -> None:
        top = None if self._best is None else self._best.top
        best, best_step = (None, None) if top is None else (top.score, top.step)
        record = EvaluationRecord(step=step, means=means, best=best, best_step=best_step)
        record.write(self.directory.attempt(self.claim.attempt))

    def save(self, step: int, *, evaluation_due: bool, wait: bool) -> Stop | None:
        """Save the state after ``step`` steps; collective.

        Args:
            step: completed steps.
            evaluation_due: whether the evaluation after these steps isn't done yet.
            wait: return when the checkpoint is durable. Otherwise the save is skipped while an earlier one is being
                written. If either is a save of one of the best evaluations, it waits for the earlier one instead.

        Returns:
            The stop upon which the ranks agreed while the save waited for an earlier one; then nothing is saved.

        Raises:
            CheckpointError: the checkpoint can't be written, and checkpoint.on_error is "fail".
            SupersededError: a later attempt owns the run.
            TaskError: the task's state can't be saved.
        """
        busy = not wait and self._world.broadcast(self.saver.busy)
        # saves of the best evaluations are extra: no other save is left out for one
        left_out = busy and (self.best_step is None or self.best_step not in (step, self.copied_step))
        stop = self._wait_for_earlier(step) if busy and not left_out else None
        if left_out and self._world.is_rank_zero:
            log.warning("no checkpoint of step %d: the one before is still being written", step)
        if not left_out and stop is None:
            self._save(step, evaluation_due=evaluation_due, wait=wait)
        self._schedule_next_save()
        return stop

    def _wait_for_earlier(self, step: int) -> Stop | None:
        """Wait for the save in flight; return the stop upon which the ranks agreed meanwhile."""
        if self._world.is_rank_zero:
            which = "it" if step == self.best_step else "the one before"
            log.info("the checkpoint of step %d waits for the one before: %s is one of the best", step, which)
        while self._world.broadcast(self.saver.busy):
            if stop := self.agreement.agree_on_stop():
                return stop
            self.saver.wait(WAIT_S)
        return None

    def require_constant_buffers(self) -> None:
        """Refuse buffers that checkpoints can't hold; see `WeightsState.require_constant_buffers`."""
        self._weights.require_constant_buffers()

    def _save(self, step: int, *, evaluation_due: bool, wait: bool) -> None:
        self.require_constant_buffers()
        world = self._world
        gathered = states_of(self._state, collective=True)
        saves, error = self.saver.begin()
        if saves:
            # only on ranks that write: a callback's state_dict isn't called where its result would be dropped
            local = states_of(self._state, collective=False)
            state = self._live_state(step, **{**ABSENT, **local, **gathered}, evaluation_due=evaluation_due)
            try:
                # a save at the end of an attempt may have only seconds: the next attempt removes older checkpoints
                self.saver.save(state, wait=wait, retain=not wait or self.is_at_end(step))
            except Exception as caught:
                # every rank must learn of the error before any of them raises
                error = caught
        # str() of a MemoryError is empty
        message = None if error is None else str(error) or repr(error)
        message, tolerable = world.broadcast((message, self._is_tolerable(error, step)))
        if message is not None and not tolerable:
            raise error or CheckpointError(
                f"rank zero could not write the checkpoint of step {step}: {message}", elsewhere=True
            )
        if message is None:
            self.copied_step = step
        if error is not None:
            log.warning("the run continues without a checkpoint of step %d: %s", step, message)

    def _is_tolerable(self, error: Exception | None, step: int) -> bool:
        """Whether the run may continue without this save: not at its end, nor once another attempt owns it."""
        warns = self.training.config.checkpoint.on_error == "warn"
        return warns and not self.is_at_end(step) and not isinstance(error, SupersededError)

    def is_at_end(self, step: int) -> bool:
        """Whether the run is over after this step."""
        return step == self.training.total_steps or self.training.ending.concluded

    def _schedule_next_save(self) -> None:
        """Set the time of the next save; none is due by time on ranks other than zero."""
        policy, saver = self.training.config.checkpoint, self.saver
        interval_s = math.inf if policy.every_min is None else policy.every_min * 60
        if not self._world.is_rank_zero:
            interval_s = math.inf
        elif policy.auto and not saver.stall_s:
            interval_s = FIRST_AUTO_SAVE_S
        elif policy.auto:
            attempts = Ledger(self.directory).attempts()
            interval_s = auto_interval_s(saver.stall_s, saver.estimated_save_s, attempts, time.time())
        self.due_at_s = self.clock() + interval_s

    def _live_state(
        self, step: int, *, model: nn.Module, optimizers: Any, scalers: Any, rng: Sequence[object] = (), **extra: Any
    ) -> LiveState:
        head = Head(
            step=step,
            samples_seen=self.training.data.samples_seen(step),
            world_size=self._world.size,
            config_digest=config_digest(self.training.config),
            score=None if self._best is None else self._best.score_at(step),
        )
        return self.saver.live_state(
            model=model, optimizers=optimizers, head=head, scalers=scalers, rng=rng, extra=extra
        )
