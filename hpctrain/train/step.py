"""One step: the micro-batches of a global batch, then one optimizer update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hpctrain.data.loader import MicroBatch
from hpctrain.errors import TaskError
from hpctrain.metrics.meter import Meter
from hpctrain.tasks.task import Task
from hpctrain.train.clipping import Clipping
from hpctrain.train.ema import Ema
from hpctrain.train.precision import AUTOCAST_TYPES, autocast
from hpctrain.train.scaling import ScaledUpdate

if TYPE_CHECKING:
    from hpctrain.train.master import MasterWeights


class TrainStep:
    """Forward, backward and update.

    Gradients are synchronised in the last micro-batch's backward alone, and are those of the mean loss over the step's
    samples, at any world size and accumulation.

    Args:
        task: gives the loss.
        model: from `replicate`.
        optimizer: over the model's parameters.
        scaler: for fp16, else None.
        precision: the kind, which decides the autocast.
        device: where the model is, or its first part.
        clipping: bounds the gradients; None for no bounds.
        learning_rate: the learning rate's factor by number of updates.
        meter: takes the loss, and the gradients' norm where clipping measures it.
        ema: averages the weights after each update; None for no average.
        master: between the optimizer's fp32 weights and the model's half ones; None where they are the same.
    """

    def __init__(
        self,
        *,
        task: Task,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler | None,
        precision: str,
        device: torch.device,
        learning_rate: Callable[[int], float],
        meter: Meter,
        clipping: Clipping | None = None,
        ema: Ema | None = None,
        master: MasterWeights | None = None,
    ) -> None:
        self._task, self._model, self._optimizer, self._scaler = task, model, optimizer, scaler
        self._device, self._meter, self._ema, self._master = device, meter, ema, master
        self._autocast = autocast(precision, device) if precision in AUTOCAST_TYPES else None
        self._replica = model if isinstance(model, DistributedDataParallel) else None
        self._clipping = clipping
        self._scaled_update = None if scaler is None else ScaledUpdate(scaler, optimizer)
        self._learning_rate = learning_rate
        self._base_rates = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
        self._parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._clears_itself = type(optimizer).zero_grad is not torch.optim.Optimizer.zero_grad
        self.skipped_updates = 0

    def __call__(self, step: int, micro_batches: Iterator[MicroBatch]) -> None:
        """Do step ``step``, counted from 0; collective."""
        self._set_learning_rate(step - self.skipped_updates)
        for micro_batch in micro_batches:
            if micro_batch.is_last or self._replica is None:
                self._backward(micro_batch)
            else:
                with self._replica.no_sync():
                    self._backward(micro_batch)
            if micro_batch.is_last:
                break
        self._update()

    def throwaway(self, micro_batch: MicroBatch) -> None:
        """A forward and backward whose gradients nobody uses; collective."""
        with torch.random.fork_rng([]):
            torch.autograd.backward(self._loss(micro_batch))

    @property
    def learning_rate(self) -> float:
        """Of the first parameter group, in the last step."""
        return float(self._optimizer.param_groups[0]["lr"])

    @property
    def figures(self) -> dict[str, float]:
        """What is logged beside the means; in fp16 it waits for the device."""
        found = {"train/lr": self.learning_rate}
        if self._scaler is not None:
            found["train/loss_scale"] = self._scaler.get_scale()
            found["train/skipped_updates"] = self.skipped_updates
        return found

    def _set_learning_rate(self, update: int) -> None:
        factor = self._learning_rate(update)
        for group, base in zip(self._optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = base * factor

    def _loss(self, micro_batch: MicroBatch) -> Tensor:
        batch = micro_batch.batch
        if self._device.type != "cpu" and not micro_batch.on_device:
            batch = self._task.to_device(batch, self._device)
        if self._autocast is None:
            loss = self._task.loss(self._model, batch)
        else:
            with self._autocast:
                loss = self._task.loss(self._model, batch)
        if not isinstance(loss, Tensor) or loss.ndim:
            raise self._no_scalar(loss)
        return loss

    def _no_scalar(self, loss: object) -> TaskError:
        expected = f"{type(self._task).__name__}.loss must return a scalar tensor, the mean over the batch's samples, "
        if isinstance(loss, Tensor):
            return TaskError(f"{expected}but its shape is {list(loss.shape)}: reduce it with .mean()")
        return TaskError(f"{expected}but it returned a {type(loss).__name__}: see its return statement")

    def _backward(self, micro_batch: MicroBatch) -> None:
        loss = self._loss(micro_batch)
        divided = loss if micro_batch.divisor == 1 else loss / micro_batch.divisor
        if self._scaler is None:
            torch.autograd.backward(divided)
        else:
            torch.autograd.backward(self._scaler.scale(divided))
        if micro_batch.num_samples:
            self._meter.add_mean("train/loss", loss, micro_batch.num_samples)

    def _update(self) -> None:
        if self._master is not None:
            self._master.collect_gradients()
        norm = None
        if self._clipping is not None:
            if self._scaler is not None:
                self._scaler.unscale_(self._optimizer)
            norm = self._clipping()
        updated = True
        if self._scaled_update is None:
            self._optimizer.step()
        else:
            updated = self._scaled_update()
        self._clear_gradients()
        if not updated:
            self.skipped_updates += 1
            return
        if norm is not None:
            # ranks skip the same updates, so they all have this name or none has
            self._meter.add_mean("train/grad_norm", norm, 1)
        if self._master is not None:
            self._master.publish()
        if self._ema is not None:
            self._ema.update()

    def _clear_gradients(self) -> None:
        if self._clears_itself:
            self._optimizer.zero_grad(set_to_none=True)
            return
        # what torch's own zero_grad does, without the profiler's record around it that costs more than all the rest
        for parameter in self._parameters:
            parameter.grad = None
