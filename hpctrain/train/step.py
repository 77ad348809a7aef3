"""One step: passes over the micro-batches of a global batch, then one update of the weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hpctrain.data.micro_batch import MicroBatch
from hpctrain.metrics.meter import Meter
from hpctrain.tasks.loss_contract import Scalar, split_loss
from hpctrain.tasks.task import Task
from hpctrain.train.precision import autocast
from hpctrain.train.profiling.timing import PartTimer
from hpctrain.train.task_log import TRAIN_PREFIX, AttachedLog
from hpctrain.train.update import Update


class TrainStep:
    """Accumulates the gradients of a global batch, and updates the weights.

    Gradients are those of the mean loss over the step's samples, at any world size and accumulation. They are reduced
    over the ranks in the last micro-batch's backward pass only.

    Args:
        task: computes the loss.
        model: from `replicate`.
        update: updates the model's weights.
        meter: collects the loss, what else the task logs, and the gradients' norm if it is measured.
        task_log: of the task.
        precision: the kind, which decides the autocast.
        device: where the model is, or its first part.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        update: Update,
        meter: Meter,
        *,
        task_log: AttachedLog,
        precision: str,
        device: torch.device,
    ) -> None:
        self.model = model
        self.update = update
        self._task = task
        self._meter = meter
        self._task_log = task_log
        self._method = f"{type(task).__name__}.loss"
        self._checked: set[str] = set()
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
        """The mean loss over a micro-batch, 0-d, in a pass that isn't a step's: what the task logs is discarded.

        Args:
            micro_batch: of this rank.
            model: the model to call instead of the step's own.

        Raises:
            TaskError: the task's loss isn't a scalar tensor, or a mapping with one.
        """
        with self._task_log.discarding():
            loss, _ = self._computed(micro_batch, self.model if model is None else model)
        return loss

    def _computed(self, micro_batch: MicroBatch, model: nn.Module) -> tuple[Tensor, dict[str, Scalar] | None]:
        batch = micro_batch.batch
        if self._device.type != "cpu" and not micro_batch.on_device:
            batch = self._task.to_device(batch, self._device)
        with self._autocast:
            loss = self._task.loss(model, batch)
        if isinstance(loss, Tensor) and not loss.ndim:
            return loss, None
        return split_loss(self._method, loss, self._checked)

    def _accumulate(self, micro_batch: MicroBatch, timer: PartTimer | None) -> None:
        loss, others = self._computed(micro_batch, self.model)
        if timer is not None:
            timer.forward_done(synchronises=self._replica is not None and micro_batch.is_last)
        self.update.backward(loss if micro_batch.divisor == 1 else loss / micro_batch.divisor)
        # a stand-in, on a rank without samples in this turn, only takes part in the sum of the gradients
        if micro_batch.num_samples:
            self._meter.add_mean("train/loss", loss, micro_batch.num_samples)
            if others:
                for name, value in others.items():
                    self._meter.add_value(f"{TRAIN_PREFIX}{name}", value, micro_batch.num_samples)
        if self._task_log.scalars:
            self._task_log.count(self._meter, micro_batch.num_samples, others or ())
        if timer is not None:
            timer.backward_done()
