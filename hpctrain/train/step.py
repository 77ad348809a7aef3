"""One step: passes over the micro-batches of a global batch, then one update of the weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hpctrain.data.micro_batch import MicroBatch
from hpctrain.errors import TaskError
from hpctrain.metrics.meter import Meter
from hpctrain.tasks.task import Task
from hpctrain.train.precision import autocast
from hpctrain.train.profiling.timing import PartTimer
from hpctrain.train.update import Update


class TrainStep:
    """Accumulates the gradients of a global batch, and updates the weights.

    Gradients are those of the mean loss over the step's samples, at any world size and accumulation. They are reduced
    over the ranks in the last micro-batch's backward pass only.

    Args:
        task: computes the loss.
        model: from `replicate`.
        update: updates the model's weights.
        meter: collects the loss, and the gradients' norm if it is measured.
        precision: the kind, which decides the autocast.
        device: where the model is, or its first part.
    """

    def __init__(
        self, task: Task, model: nn.Module, update: Update, meter: Meter, *, precision: str, device: torch.device
    ) -> None:
        self.model = model
        self.update = update
        self._task = task
        self._meter = meter
        self._device = device
        self._autocast = autocast(precision, device)
        self._replica = model if isinstance(model, DistributedDataParallel) else None

    def __call__(self, step: int, micro_batches: Iterator[MicroBatch], timer: PartTimer | None = None) -> None:
        """Run step ``step``, counted from 0; collective.

        Args:
            step: its number.
            micro_batches: of this rank; those of the step are consumed.
            timer: times the parts of this step; None for no timing.
        """
        if timer is not None:
            timer.begin()
        self.update.begin(step)
        for micro_batch in micro_batches:
            if timer is not None:
                timer.mark("data")
            # no_sync has to enclose forward and backward: DDP decides in the forward pass whether the backward sends
            if micro_batch.is_last or self._replica is None:
                self._accumulate(micro_batch, timer)
            else:
                with self._replica.no_sync():
                    self._accumulate(micro_batch, timer)
            if micro_batch.is_last:
                break
        norm = self.update()
        if norm is not None:
            self._meter.add_mean("train/grad_norm", norm, 1)
        if timer is not None:
            timer.mark("optimizer")

    def loss(self, micro_batch: MicroBatch, model: nn.Module | None = None) -> Tensor:
        """The mean loss over a micro-batch, 0-d.

        Args:
            micro_batch: of this rank.
            model: the model to call instead of the step's own.

        Raises:
            TaskError: the task's loss isn't a scalar tensor.
        """
        batch = micro_batch.batch
        called = self.model if model is None else model
        if self._device.type != "cpu" and not micro_batch.on_device:
            batch = self._task.to_device(batch, self._device)
        with self._autocast:
            loss = self._task.loss(called, batch)
        if not isinstance(loss, Tensor) or loss.ndim:
            raise self._not_a_scalar(loss)
        return loss

    def _accumulate(self, micro_batch: MicroBatch, timer: PartTimer | None) -> None:
        loss = self.loss(micro_batch)
        if timer is not None:
            timer.forward_done(synchronises=self._replica is not None and micro_batch.is_last)
        self.update.backward(loss if micro_batch.divisor == 1 else loss / micro_batch.divisor)
        # a stand-in, on a rank without samples in this turn, only takes part in the sum of the gradients
        if micro_batch.num_samples:
            self._meter.add_mean("train/loss", loss, micro_batch.num_samples)
        if timer is not None:
            timer.backward_done()

    def _not_a_scalar(self, loss: object) -> TaskError:
        expected = f"{type(self._task).__name__}.loss must return a scalar tensor, the mean over the batch's samples, "
        if isinstance(loss, Tensor):
            return TaskError(f"{expected}but its shape is {list(loss.shape)}: reduce it with .mean()")
        return TaskError(f"{expected}but it returned a {type(loss).__name__}: check its return statement")
