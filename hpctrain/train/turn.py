"""A turn of a step: one loss, its gradients over a global batch, and the updates of the optimizers that step for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hpctrain.data.micro_batch import MicroBatch, map_tensors
from hpctrain.distributed.replica import LossModule, dismantle
from hpctrain.metrics.meter import Meter
from hpctrain.tasks.loss_contract import Scalar, split_loss
from hpctrain.tasks.task import Task
from hpctrain.train.precision import MasterWeights, autocast
from hpctrain.train.profiling.timing import PartTimer
from hpctrain.train.task_log import TRAIN_PREFIX, AttachedLog
from hpctrain.train.update import Update


class Trained:
    """The parameters of a turn, some of which may be trained only from a later step on.

    Args:
        since: parameters of the model that computes, and the completed steps from which each is trained.
    """

    def __init__(self, since: Iterable[tuple[nn.Parameter, int]]) -> None:
        self._since = list(since)

    @property
    def all(self) -> list[nn.Parameter]:
        """All of them, in the model's order."""
        return [parameter for parameter, _ in self._since]

    def at(self, step: int) -> list[nn.Parameter]:
        """Return those that are trained in step ``step``, counted from 0."""
        return [parameter for parameter, since in self._since if since <= step]

    def next_change(self, step: int) -> int | None:
        """Return the first step after ``step`` from which more of them are trained; None without one."""
        return min((since for _, since in self._since if since > step), default=None)


class Turn:
    """Accumulates the gradients of one loss over a global batch, and updates the weights that this loss trains.

    Gradients are those of the mean loss over the step's samples, at any world size and accumulation. They are reduced
    over the ranks in the last micro-batch's backward pass only.

    Args:
        task: computes the loss.
        module: that computes it, without DDP's wrapper.
        trained: its parameters that the turn trains.
        updates: of the optimizers that step for this loss.
        meter: collects the loss, what else the task logs, and the gradients' norm if it is measured.
        task_log: of the task.
        precision: the kind, which decides the autocast.
        device: where the model is, or its first part.
        wrap: puts a module in DDP; collective.
        method: the task's method that computes the loss.
        scaler: of the loss, for fp16; else None.
        master: copies gradients and weights between fp32 and half precision; None if there is only one set of weights.
        every_steps: the turn takes part in every so many steps.
        name: of the turn among several, for its metrics; empty for the only one. With several, the task gets the module
            itself, so that it may call its parts.

    Attributes:
        model: what is called in training; a replica if there are several ranks.
        trained: parameters of the module.
        awake: those of them that are trained in this step, once `prepare` was called.
        updates: of its optimizers.
        scaler: of the loss.
        name: of the turn.
        every_steps: as given.
        computing: whether the task computes the loss at the moment.
        after_backward: called after the last backward pass, before gradients are clipped; None for nothing.
    """

    def __init__(
        self,
        task: Task,
        module: nn.Module,
        trained: Trained,
        updates: Sequence[Update],
        meter: Meter,
        *,
        task_log: AttachedLog,
        precision: str,
        device: torch.device,
        wrap: Callable[[nn.Module], nn.Module] = lambda module: module,
        method: str = "loss",
        scaler: torch.amp.GradScaler | None = None,
        master: MasterWeights | None = None,
        every_steps: int = 1,
        name: str = "",
    ) -> None:
        self.trained = trained
        self.updates = updates
        self.scaler = scaler
        self.name = name
        self.every_steps = every_steps
        self.computing = False
        self.after_backward: Callable[[], None] | None = None
        self.method = f"{type(task).__name__}.{method}"
        self.suffix = f"/{name}" if name else ""
        self.loss_name = f"train/loss{self.suffix}"
        self.scale_name = f"train/loss_scale{self.suffix}"
        self._loss: Callable[[nn.Module, Any], Any] = getattr(task, method)
        self._checked: set[str] = set()
        self._to_device = task.to_device
        self._module = module
        self._meter = meter
        self._task_log = task_log
        self._device = device
        self._autocast = autocast(precision, device)
        self._wrap = wrap
        self._master = master
        self.awake: Sequence[nn.Parameter] = ()
        self._adopt(module)

    @property
    def num_skipped(self) -> int:
        """Updates that its optimizers have skipped since the start of the run."""
        return sum(update.num_skipped for update in self.updates)

    @property
    def metrics(self) -> dict[str, float]:
        """Values to log of the last updates; in fp16 reading them waits for the device."""
        values: dict[str, float] = {}
        for update in self.updates:
            values |= update.metrics
        if self.scaler is not None:
            values[self.scale_name] = self.scaler.get_scale()
        return values

    def prepare(self, step: int) -> bool:
        """Build the replica for the parameters that are trained from step ``step`` on; collective.

        No other parameter may require a gradient, unless it belongs to no turn.

        Returns:
            Whether it had to be built.
        """
        awake = self.trained.at(step)
        if len(awake) == len(self.awake):
            return False
        self.awake = awake
        self.require_gradients(True)
        dismantle(self.model)
        self._adopt(self._wrap(LossModule(self._module) if self.name else self._module))
        return True

    def require_gradients(self, required: bool) -> None:
        """Have the parameters that the turn trains in this step require gradients, or not."""
        for parameter in self.awake:
            parameter.requires_grad = required

    @contextmanager
    def gradients_required(self) -> Iterator[None]:
        """Require gradients in the context, and afterwards only if they are required now."""
        before = [parameter.requires_grad for parameter in self.awake]
        self.require_gradients(True)
        try:
            yield
        finally:
            for parameter, required in zip(self.awake, before, strict=True):
                parameter.requires_grad = required

    def __call__(self, step: int, micro_batches: Iterator[MicroBatch], timer: PartTimer | None) -> bool:
        """Take the turn in step ``step``, counted from 0; collective.

        Args:
            step: its number.
            micro_batches: of this rank; those of the step are consumed.
            timer: times the parts of this step; None for no timing.

        Returns:
            Whether weights were updated.
        """
        if self._master is not None:
            self._master.begin_step()
        for update in self.updates:
            update.begin(step)
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
        updated = self._update()
        if timer is not None:
            timer.mark("optimizer")
        return updated

    def loss(self, micro_batch: MicroBatch, model: nn.Module | None = None) -> Tensor:
        """The mean loss over a micro-batch, 0-d, in a pass that isn't a step's: what the task logs is discarded.

        Args:
            micro_batch: of this rank.
            model: the module to call instead of the turn's own.

        Raises:
            TaskError: the task's loss isn't a scalar tensor, or a mapping with one.
        """
        with self._task_log.discarding():
            loss, _ = self._computed(micro_batch, model)
        return loss

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss, under the loss scale."""
        torch.autograd.backward(loss if self.scaler is None else self.scaler.scale(loss))

    def _adopt(self, model: nn.Module) -> None:
        self.model = model
        self._replica = model if isinstance(model, DistributedDataParallel) else None

    def _computed(
        self, micro_batch: MicroBatch, model: nn.Module | None = None
    ) -> tuple[Tensor, dict[str, Scalar] | None]:
        batch = micro_batch.batch
        if self._device.type != "cpu" and not micro_batch.on_device:
            batch = self._to_device(batch, self._device)
        elif self.name:
            # the turns share the tensors only: what a loss does to a dict or a list of the batch is its own
            batch = map_tensors(lambda tensor: tensor, batch)
        self.computing = True
        try:
            with self._autocast:
                if self.name and model is None:
                    # the whole loss is one forward pass of the replica: it may call parts of the module repeatedly
                    loss = self.model(lambda module: self._loss(module, batch))
                else:
                    loss = self._loss(self.model if model is None else model, batch)
        finally:
            self.computing = False
        if isinstance(loss, Tensor) and not loss.ndim:
            return loss, None
        return split_loss(self.method, loss, self._checked, self._task_log.own_names)

    def _accumulate(self, micro_batch: MicroBatch, timer: PartTimer | None) -> None:
        loss, others = self._computed(micro_batch)
        if timer is not None:
            timer.forward_done(self.awake, synchronises=self._replica is not None and micro_batch.is_last)
        if self.name and (others or self._task_log.scalars):
            self._task_log.require_one_turn(self.method, others or ())
        self.backward(loss if micro_batch.divisor == 1 else loss / micro_batch.divisor)
        # a stand-in, on a rank without samples in this turn, only takes part in the sum of the gradients
        if micro_batch.num_samples:
            self._meter.add_mean(self.loss_name, loss, micro_batch.num_samples)
            if others:
                for name, value in others.items():
                    self._meter.add_value(f"{TRAIN_PREFIX}{name}", value, micro_batch.num_samples)
        if self._task_log.scalars:
            self._task_log.count(self._meter, micro_batch.num_samples, others or ())
        if timer is not None:
            timer.backward_done()

    def _update(self) -> bool:
        if self._master is not None:
            self._master.end_step()
            self._master.collect_gradients()
        if self.after_backward is not None:
            self.after_backward()
        updated = False
        for update in self.updates:
            updated |= update()
            if update.norm is not None:
                self._meter.add_mean(update.norm_name, update.norm, 1)
        if self.scaler is not None:
            self.scaler.update()
        if updated and self._master is not None:
            self._master.publish()
        return updated
