"""A turn of a step: one loss, its gradients over a global batch, and the updates of the optimizers that step for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from hpctrain.data.micro_batch import MicroBatch
from hpctrain.errors import TaskError
from hpctrain.phrases import listed
from hpctrain.train.empty_pass import EmptyPass, exchanges_nothing, zero_of
from hpctrain.train.joint_update import JointUpdate
from hpctrain.train.loss import Loss
from hpctrain.train.part_timer import PartTimer
from hpctrain.train.trained_module import TrainedModule


class Turn:
    """Accumulates the gradients of one loss over a global batch, and updates the weights that this loss trains.

    Gradients are those of the mean loss over the step's samples, at any world size and accumulation. They are reduced
    over the ranks in the last micro-batch's backward pass only.

    Args:
        loss: whose gradients are accumulated.
        module: computes the loss, and has the parameters that the turn trains.
        update: of the optimizers that step for this loss.
        every_steps: the turn takes part in every so many steps.

    Attributes:
        loss: as given.
        module: as given.
        update: as given.
        every_steps: as given.
        after_first_backward: called once, after the first global batch's last backward pass; None for nothing.
        backward_to_share: adds the gradients of a step's last micro-batch, for which other ranks wait; None if they
            don't.
    """

    def __init__(self, loss: Loss, module: TrainedModule, update: JointUpdate, *, every_steps: int = 1) -> None:
        self.loss = loss
        self.module = module
        self.update = update
        self.every_steps = every_steps
        self.after_first_backward: Callable[[], None] | None = None
        self.backward_to_share: Callable[[Tensor], None] | None = None

    @property
    def metrics(self) -> dict[str, float]:
        """Values to log of the last updates; in fp16 reading them may wait for the device."""
        update = self.update
        return update.metrics | ({} if update.scaler is None else {self.loss.scale_name: update.loss_scale})

    def __call__(self, step: int, micro_batches: Iterator[MicroBatch], timer: PartTimer | None) -> bool:
        """Take the turn in step ``step``, counted from 0; collective.

        Args:
            step: its number.
            micro_batches: of this rank; those of the step are consumed.
            timer: times the parts of this step; None for no timing.

        Returns:
            Whether weights were updated.
        """
        self.update.begin(step)
        accumulating = self.module.accumulating
        for micro_batch in micro_batches:
            if timer is not None:
                timer.mark("data")
            # no_sync has to enclose forward and backward: DDP decides in the forward pass whether the backward sends
            if micro_batch.is_last or accumulating is None:
                self._accumulate(micro_batch, timer)
            else:
                with accumulating():
                    self._accumulate(micro_batch, timer)
            if micro_batch.is_last:
                break
        return self._end(timer, micro_batch.rescale)

    def _end(self, timer: PartTimer | None, rescale: float) -> bool:
        """Update the weights after the last backward pass; return whether they were updated.

        Args:
            timer: times the parts of this step; None for no timing.
            rescale: factor of the gradients; 0 if nothing in the step has a weight.
        """
        if self.after_first_backward is not None:
            self._call_after_first_backward()
        updated = self.update(rescale)
        if timer is not None:
            timer.mark("optimizer")
        return updated

    def try_out(self, micro_batch: MicroBatch) -> None:
        """Compute the gradients of a micro-batch in a pass that isn't a step's, under no loss scale; collective."""
        if micro_batch.weight == 0:
            self._add_nothing(micro_batch)
        else:
            loss = self.loss.compute_unlogged(self.module.replica, micro_batch)
            self._require_dependence(loss)
            torch.autograd.backward(loss)
        if self.after_first_backward is not None:
            self._call_after_first_backward()

    def _call_after_first_backward(self) -> None:
        assert self.after_first_backward is not None
        self.after_first_backward()
        self.after_first_backward = None

    def _require_dependence(self, loss: Tensor) -> None:
        if loss.requires_grad:
            return
        names = listed(self.module.names_of(self.module.unfrozen), shown=3)
        raise TaskError(
            f"{self.loss.method} depends on none of the parameters that it trains ({names}): compute it from them, "
            "without detach() and no_grad(), and return it without calling backward()"
        ) from None

    def _accumulate(self, micro_batch: MicroBatch, timer: PartTimer | None) -> None:
        if micro_batch.weight == 0:
            self._add_nothing(micro_batch)
            if timer is not None:
                timer.mark("backward")
            return
        module = self.module
        loss, others = self.loss(module.replica, micro_batch)
        if timer is not None:
            timer.forward_done(module.unfrozen, synchronises=module.ddp is not None and micro_batch.is_last)
        self.add_gradients(loss, micro_batch)
        weight = micro_batch.weight
        self.loss.collect(loss, others, micro_batch.num_samples if weight is None else weight)
        if timer is not None:
            timer.backward_done()

    def _add_nothing(self, micro_batch: MicroBatch) -> None:
        """Take part in the collectives of a pass, with a micro-batch of weight 0.

        The task's loss is computed only if the model exchanges something with other ranks.
        """
        replica = self.module.replica
        if exchanges_nothing(replica):
            self.update.backward(replica(zero_of))
            return
        empty = EmptyPass()
        with empty.forward(replica):
            loss = self.loss.compute_unlogged(replica, micro_batch)
        with empty.backward():
            # also in the pass before the first step, whose divisor was not computed
            self.add_gradients(loss, micro_batch._replace(divisor=math.inf))

    def add_gradients(self, loss: Tensor, micro_batch: MicroBatch) -> None:
        """Add the gradients of a loss to those of the step; collective with parallel=mesh, or in the last micro-batch.

        Args:
            loss: the mean over the micro-batch, 0-d.
            micro_batch: over which it was computed.

        Raises:
            TaskError: the loss depends on no parameter that is trained, or not on all for which other ranks wait.
        """
        backward: Callable[[Tensor], None] = self.update.backward
        if micro_batch.is_last and self.backward_to_share is not None:
            backward = self.backward_to_share
        try:
            backward(loss if micro_batch.divisor == 1 else loss / micro_batch.divisor)
        except RuntimeError:
            self._require_dependence(loss)
            raise
