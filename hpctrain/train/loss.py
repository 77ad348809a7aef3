"""A loss of the task: its value on this rank's micro-batches, and what the training logs of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.config.precision import NumberFormats
from hpctrain.data.micro_batch import MicroBatch, map_tensors
from hpctrain.distributed.local_part import whole
from hpctrain.metrics.meter import Meter
from hpctrain.tasks.loss_contract import Scalar, split_loss
from hpctrain.tasks.task import Task
from hpctrain.train.precision import autocasting
from hpctrain.train.task_log import TRAIN_PREFIX, AttachedLog


class Loss:
    """Computes one loss of a task, and collects it with what else the task logs.

    Args:
        task: computes the loss.
        meter: collects the loss and the logged scalars.
        task_log: of the task.
        precision: the number formats, which decide the autocast.
        device: where the model is, or its first part.
        method: the task's method that computes the loss.
        makes_whole: whether results may be DTensors, as those of a model are that divides its outputs among ranks.
        name: of the loss among several, for its metrics; empty for the only one.

    Attributes:
        name: as given.
        method: the task's class and method, for messages.
        suffix: of names under which something is logged of this loss; empty for the only one.
        log_name: under which the mean loss is logged.
        scale_name: under which the loss scale is logged.
        is_computing: whether the task computes the loss at the moment.
        complete_constant: called with a loss that is a constant, and the model; returns what takes its place. None to
            leave it as it is.
    """

    def __init__(
        self,
        task: Task,
        meter: Meter,
        task_log: AttachedLog,
        *,
        precision: NumberFormats,
        device: torch.device,
        method: str = "loss",
        name: str = "",
        makes_whole: bool = False,
    ) -> None:
        self.name = name
        self.method = f"{type(task).__name__}.{method}"
        self.suffix = f"/{name}" if name else ""
        self.log_name = f"train/loss{self.suffix}"
        self.scale_name = f"train/loss_scale{self.suffix}"
        self.is_computing = False
        self.complete_constant: Callable[[Tensor, nn.Module], Tensor] | None = None
        compute: Callable[[nn.Module, Any], Any] = getattr(task, method)
        self._compute = autocasting(compute, precision, device)
        self._to_device = task.to_device
        self._meter = meter
        self._task_log = task_log
        self._device = device
        self._makes_whole = makes_whole
        self._checked: set[str] = set()
        # what the newest loss returned beside it, which can't leave the forward pass with it
        self._others: dict[str, Scalar] | None = None

    def __call__(self, replica: Callable[..., Any], micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Scalar] | None]:
        """Compute the loss in a step.

        Args:
            replica: a `LossModule`, or DDP around one.
            micro_batch: of this rank.

        Returns:
            The mean loss over the micro-batch, 0-d, and the other scalars that the task returned, by name.

        Raises:
            TaskError: the task's loss isn't a scalar tensor, or a mapping with one; or another loss logs the same name.
        """
        batch = micro_batch.batch
        if self._device.type != "cpu" and not micro_batch.on_device:
            batch = self._to_device(batch, self._device)
        elif self.name:
            # the turns share the tensors only: what a loss does to a dict or a list of the batch is its own
            batch = map_tensors(lambda tensor: tensor, batch)
        self.is_computing = True
        try:
            # the loss alone leaves the forward pass: DDP expects gradients of all that reaches what it returns
            loss: Tensor = replica(partial(self._compute_loss, batch))
        finally:
            self.is_computing = False
        others, self._others = self._others, None
        if self.name and (others or self._task_log.scalars):
            self._task_log.require_one_turn(self.method, others or ())
        return loss, others

    def compute_unlogged(self, replica: Callable[..., Any], micro_batch: MicroBatch) -> Tensor:
        """Compute the mean loss, 0-d, in a pass that isn't a step's: what the task logs is discarded.

        Args:
            replica: as for a step.
            micro_batch: of this rank.

        Raises:
            TaskError: the task's loss isn't a scalar tensor, or a mapping with one.
        """
        with self._task_log.discarding():
            return self(replica, micro_batch)[0]

    def collect(self, loss: Tensor, others: Mapping[str, Scalar] | None, weight: float) -> None:
        """Add to the meter a result of this loss, and what the task has logged with it.

        Args:
            loss: the mean over a micro-batch, 0-d.
            others: scalars that the task returned with it.
            weight: of the micro-batch; 0 if it only takes part in the sum of the gradients.
        """
        if weight:
            self._meter.add_mean(self.log_name, loss, weight)
            if others:
                if self._task_log.names.of_callbacks:
                    self._task_log.require_not_of_callbacks(others)
                for name, value in others.items():
                    self._meter.add_value(f"{TRAIN_PREFIX}{name}", value, weight)
        if self._task_log.scalars:
            self._task_log.add_to_meter(self._meter, weight, others or ())

    def _compute_loss(self, batch: Any, model: nn.Module) -> Tensor:
        loss = self._compute(model, batch)
        if self._makes_whole:
            # copies: of a view, FSDP2 warns that changes in place would harm it
            loss = map_tensors(lambda value: whole(value).clone(), loss)
        if not isinstance(loss, Tensor) or loss.ndim:
            loss, self._others = split_loss(self.method, loss, self._checked, self._task_log.own_names)
        if loss.grad_fn is None and self.complete_constant is not None:
            loss = self.complete_constant(loss, model)
        return loss
