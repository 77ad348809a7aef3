"""A turn of a step: one loss, its gradients over a global batch, and the updates of the optimizers that step for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hpctrain.data.micro_batch import MicroBatch
from hpctrain.train.joint_update import JointUpdate
from hpctrain.train.loss import Loss
from hpctrain.train.profiling.timing import PartTimer
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
        after_backward: called after the last backward pass, before gradients are clipped; None for nothing.
    """

    def __init__(self, loss: Loss, module: TrainedModule, update: JointUpdate, *, every_steps: int = 1) -> None:
        self.loss = loss
        self.module = module
        self.update = update
        self.every_steps = every_steps
        self.after_backward: Callable[[], None] | None = None

    @property
    def metrics(self) -> dict[str, float]:
        """Values to log of the last updates; in fp16 reading them waits for the device."""
        scaler = self.update.scaler
        return self.update.metrics | ({} if scaler is None else {self.loss.scale_name: scaler.get_scale()})

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
        ddp = self.module.ddp
        for micro_batch in micro_batches:
            if timer is not None:
                timer.mark("data")
            # no_sync has to enclose forward and backward: DDP decides in the forward pass whether the backward sends
            if micro_batch.is_last or ddp is None:
                self._accumulate(micro_batch, timer)
            else:
                with ddp.no_sync():
                    self._accumulate(micro_batch, timer)
            if micro_batch.is_last:
                break
        self.update.collect_gradients()
        if self.after_backward is not None:
            self.after_backward()
        updated = self.update()
        if timer is not None:
            timer.mark("optimizer")
        return updated

    def _accumulate(self, micro_batch: MicroBatch, timer: PartTimer | None) -> None:
        module = self.module
        loss, others = self.loss(module.replica, micro_batch)
        if timer is not None:
            timer.forward_done(module.unfrozen, synchronises=module.ddp is not None and micro_batch.is_last)
        self.update.backward(loss if micro_batch.divisor == 1 else loss / micro_batch.divisor)
        self.loss.collect(loss, others, micro_batch.num_samples)
        if timer is not None:
            timer.backward_done()
