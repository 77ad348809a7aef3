"""The turn of a step in a pipeline: its micro-batches pass through the stages of several ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor

from hpctrain.data.micro_batch import MicroBatch, shapes_of
from hpctrain.distributed.pipeline.pipeline import Pipeline, Replica
from hpctrain.train.joint_update import JointUpdate
from hpctrain.train.loss import Loss
from hpctrain.train.profiling.timing import PartTimer
from hpctrain.train.task_log import AttachedLog
from hpctrain.train.task_state import TaskState
from hpctrain.train.trained_module import TrainedModule
from hpctrain.train.turn import Turn

MOST_MICRO_BATCHES = 2**20
"""Of a step; keeps the numbers of micro-batches of different steps apart."""


class PipelinedTurn(Turn):
    """A `Turn` whose loss the last stage of a pipeline computes, and whose gradients pass back through the stages.

    Args:
        loss: whose gradients are accumulated.
        module: computes the loss, and has the parameters that the turn trains.
        update: of the optimizers that step for this loss.
        pipeline: this rank's part in the pipeline.
        task_log: of the task.
        task_state: of the task.
        every_steps: the turn takes part in every so many steps.
    """

    def __init__(
        self,
        loss: Loss,
        module: TrainedModule,
        update: JointUpdate,
        *,
        pipeline: Pipeline,
        task_log: AttachedLog,
        task_state: TaskState,
        every_steps: int = 1,
    ) -> None:
        super().__init__(loss, module, update, every_steps=every_steps)
        self.pipeline = pipeline
        self.task_log = task_log
        self.task_state = task_state

    def __call__(self, step: int, micro_batches: Iterator[MicroBatch], timer: PartTimer | None) -> bool:
        """Take the turn in step ``step``, counted from 0; see `Turn`."""
        self.update.begin(step)
        own = list(_until_last(micro_batches))
        if timer is not None:
            timer.mark("data")
        if self.update.scaler is not None:
            # where no loss is scaled, the scaler has no scale yet
            self.update.scaler.scale(torch.zeros((), device=self.pipeline.device))
        work = _StepOfTurn(self, own, timer)
        # all ranks of a pipeline have the same batches
        self.pipeline.step(work, [shapes_of(each.batch) for each in own], step * MOST_MICRO_BATCHES)
        return self._end(timer)


class _StepOfTurn:
    """The passes of one step."""

    def __init__(self, turn: PipelinedTurn, micro_batches: Sequence[MicroBatch], timer: PartTimer | None) -> None:
        self._turn = turn
        self._micro_batches = micro_batches
        self._timer = timer
        self._stages = turn.pipeline.stages
        self._task_log = turn.task_log
        self._task_state = turn.task_state

    def forward(self, replica: Replica, own: int, micro_batch: int) -> Any:
        given = self._micro_batches[micro_batch]
        has_loss = self._stages.ends(own)
        with ExitStack() as contexts:
            if not has_loss:
                contexts.enter_context(self._task_log.discarding())
            if own + 1 < self._stages.num_own:
                # the task's code runs once for each stage, and counts once
                contexts.enter_context(self._task_state.restored())
            found, others = self._turn.loss(replica, given)
        if self._timer is not None:
            self._timer.mark("forward")
        if has_loss:
            self._turn.loss.collect(found, others, given.num_samples)
        return found

    def backward(self, found: Any, gradients: Sequence[Tensor] | None, micro_batch: int) -> None:
        given = self._micro_batches[micro_batch]
        accumulating = None if given.is_last else self._turn.module.accumulating
        with nullcontext() if accumulating is None else accumulating():
            if gradients is None:
                self._turn.add_gradients(found, given)
            else:
                torch.autograd.backward(found, gradients)
        if self._timer is not None:
            self._timer.mark("backward")


def _until_last(micro_batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
    for micro_batch in micro_batches:
        yield micro_batch
        if micro_batch.is_last:
            return
