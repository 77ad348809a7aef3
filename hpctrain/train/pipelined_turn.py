"""The turn of a step in a pipeline: its micro-batches pass through the stages of several ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hpctrain.data.micro_batch import MOST_MICRO_BATCHES, MicroBatch, shapes_of
from hpctrain.errors import TaskError
from hpctrain.parallel.pipeline.pipeline import Pipeline, Replica
from hpctrain.phrases import listed
from hpctrain.train.part_timer import PartTimer
from hpctrain.train.task_state import TaskState
from hpctrain.train.trained_module import EmptyPass, TrainedModule
from hpctrain.train.turn import Loss, Turn
from hpctrain.train.unused_parameters import GradientCheck
from hpctrain.train.update import JointUpdate, parameters_of


class PipelinedTurn(Turn):
    """A `Turn` whose loss the last stage of a pipeline computes, and whose gradients pass back through the stages.

    Args:
        loss: whose gradients are accumulated.
        module: computes the loss, and has the parameters that the turn trains.
        update: of the optimizers that step for this loss.
        gradients: checks that the parameters get gradients.
        pipeline: this rank's part in the pipeline.
        task_state: of the task.
        every_steps: steps from one turn to the next.

    Raises:
        TaskError: there is a loss scale, and an optimizer trains nothing on this rank.
    """

    def __init__(
        self,
        loss: Loss,
        module: TrainedModule,
        update: JointUpdate,
        gradients: GradientCheck,
        *,
        pipeline: Pipeline,
        task_state: TaskState,
        every_steps: int = 1,
    ) -> None:
        super().__init__(loss, module, update, gradients, every_steps=every_steps)
        # ranks exchange overflows for each optimizer, where it has gradients
        idle = [member for member in update.updates if all(p.is_meta for p in parameters_of(member.optimizer))]
        if update.scaler is not None and idle:
            names = listed([f"optimizer.named.{member.name}" for member in idle if member.name]) or "the optimizer"
            raise TaskError(
                f"{names} trains no parameter of a stage, which doesn't work with the loss scale of fp16: use "
                "precision=bf16, or cut the model elsewhere (parallel.stages)"
            )
        self.pipeline = pipeline
        self.task_state = task_state

    def __call__(self, step: int, micro_batches: Iterator[MicroBatch], timer: PartTimer | None) -> bool:
        """Take the turn in step ``step``, counted from 0; see `Turn`."""
        self.update.begin(step)
        first = step * MOST_MICRO_BATCHES
        # what loading draws in this process has to be the same on all ranks of the pipeline, too
        with self.pipeline.streams.of_task(first + MOST_MICRO_BATCHES - 1):
            step_batches = list(_until_last(micro_batches))
        if timer is not None:
            timer.mark("data")
        if self.update.scaler is not None:
            # GradScaler makes its scale when it first scales something, and only the last stage scales a loss
            self.update.scaler.scale(torch.zeros((), device=self.pipeline.device))
        work = _StepOfTurn(self, step_batches, timer)
        self.pipeline.step(work, [shapes_of(micro_batch.batch) for micro_batch in step_batches], first)
        if self.gradients.is_due:
            self.gradients.check()
        updated = self.update(step_batches[-1].rescale)
        if timer is not None:
            timer.mark("optimizer")
        return updated


class _StepOfTurn:
    """The passes of one step."""

    def __init__(self, turn: PipelinedTurn, micro_batches: Sequence[MicroBatch], timer: PartTimer | None) -> None:
        self._turn = turn
        self._micro_batches = micro_batches
        self._timer = timer
        self._empty: dict[int, EmptyPass] = {}

    def forward(self, replica: Replica, local_stage: int, micro_batch: int) -> Any:
        turn = self._turn
        batch = self._micro_batches[micro_batch]
        has_loss = turn.pipeline.stages.ends(local_stage)
        with ExitStack() as contexts:
            if not has_loss or batch.weight == 0:
                contexts.enter_context(turn.loss.task_log.discarding())
            if batch.weight == 0:
                if micro_batch not in self._empty:
                    self._empty[micro_batch] = EmptyPass(shares_statistics=turn.module.shares_statistics)
                contexts.enter_context(self._empty[micro_batch].forward(turn.module.replica))
            if local_stage + 1 < turn.pipeline.stages.num_own:
                # the task's code runs once for each stage, and counts once
                contexts.enter_context(turn.task_state.restored())
            output = replica(partial(turn.compute_loss, batch))
        if self._timer is not None:
            self._timer.mark("forward")
        if has_loss and batch.weight != 0:
            turn.collect(output, batch)
        return output

    def backward(self, output: Any, gradients: Sequence[Tensor] | None, micro_batch: int) -> None:
        batch = self._micro_batches[micro_batch]
        accumulating = None if batch.is_last else self._turn.module.accumulating
        empty = self._empty.get(micro_batch)
        with (
            nullcontext() if accumulating is None else accumulating(),
            nullcontext() if empty is None else empty.backward(),
        ):
            if gradients is None:
                self._turn.add_gradients(output, batch)
            else:
                torch.autograd.backward(output, gradients)
        if self._timer is not None:
            self._timer.mark("backward")


def _until_last(micro_batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
    for micro_batch in micro_batches:
        yield micro_batch
        if micro_batch.is_last:
            return
