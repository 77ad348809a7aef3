"""The joint update of the optimizers that step for one loss, under one loss scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hpctrain.distributed.local_part import local_parts
from hpctrain.metrics.meter import Meter
from hpctrain.train.precision import MasterWeights
from hpctrain.train.update import Update, parameters_of


class JointUpdate:
    """The updates of the optimizers that step for one loss.

    Args:
        updates: one for each optimizer.
        meter: collects the norms of the gradients that are measured.
        scaler: of the loss, for fp16; else None.
        master: copies gradients and weights between fp32 and half precision; None if there is only one set of weights.

    Attributes:
        updates: as given.
        scaler: as given.
        backward: adds the gradients of a loss, under the loss scale.
        after_backward: called after the last backward pass, before gradients are clipped; None for nothing.
    """

    def __init__(
        self,
        updates: Sequence[Update],
        meter: Meter,
        *,
        scaler: torch.amp.GradScaler | None = None,
        master: MasterWeights | None = None,
    ) -> None:
        self.updates = updates
        self.scaler = scaler
        self.backward = torch.autograd.backward if scaler is None else self._scaled_backward
        self.after_backward: Callable[[], None] | None = None
        self._meter = meter
        self._master = master
        self._loss_scale: float | None = None

    @property
    def num_skipped(self) -> int:
        """Updates that the optimizers have skipped since the start of the run."""
        return sum(update.num_skipped for update in self.updates)

    @property
    def metrics(self) -> dict[str, float]:
        """Values to log of the last updates."""
        return {name: value for update in self.updates for name, value in update.metrics.items()}

    @property
    def loss_scale(self) -> float:
        """The factor of the next loss; reading it may wait for the device."""
        if self.scaler is None:
            return 1.0
        return self.scaler.get_scale() if self._loss_scale is None else self._loss_scale

    def begin(self, step: int) -> None:
        """Prepare step ``step``, counted from 0, before its first forward pass."""
        if self._master is not None:
            self._master.begin_step()
        for update in self.updates:
            update.begin(step)

    def __call__(self, rescale: float = 1.0) -> bool:
        """Update the weights from the accumulated gradients, after the last backward pass, and clear the gradients.

        Args:
            rescale: factor of the gradients; with 0, nothing is updated.

        Returns:
            Whether weights were updated; ranks skip the same updates.
        """
        if self._master is not None:
            self._master.end_step()
            self._master.collect_gradients()
        if rescale != 1.0:
            if not rescale:
                for update in self.updates:
                    update.leave_out()
                return False
            self._rescale(rescale)
        if self.after_backward is not None:
            self.after_backward()
        if self.scaler is None:
            updated = True
            for update in self.updates:
                update()
        else:
            updated = self._update_scaled(self.scaler)
        for update in self.updates:
            if update.norm is not None:
                self._meter.add_mean(update.norm_name, update.norm, 1)
        if updated and self._master is not None:
            self._master.publish()
        return updated

    def _rescale(self, factor: float) -> None:
        parameters = [parameter for update in self.updates for parameter in parameters_of(update.optimizer)]
        parts = local_parts(parameter.grad for parameter in parameters if parameter.grad is not None)
        if parts:
            torch._foreach_mul_(parts, factor)

    def _update_scaled(self, scaler: torch.amp.GradScaler) -> bool:
        """Update the weights unless their gradients overflowed, then the scale; return whether any were updated."""
        # With fused optimizers the host waits once: one transfer reads which updates were skipped, and the new scale.
        # For other optimizers, the scaler itself waits before each `step`; the scale isn't read then, since that would
        # wait for the update.
        skipped = [update.step_scaled(scaler) for update in self.updates]
        unread = [overflows for overflows in skipped if isinstance(overflows, Tensor)]
        if unread and len(skipped) > 1:
            # copied, because `scaler.update` adds what the other optimizers found to the first one's tensor
            unread = [*torch.stack(unread)]
        scaler.update()
        self._loss_scale = None
        if unread:
            assert scaler._scale is not None
            *overflows, self._loss_scale = torch.stack([*unread, scaler._scale]).tolist()
            read = iter(overflows)
            skipped = [bool(next(read)) if isinstance(each, Tensor) else each for each in skipped]
        for update, each in zip(self.updates, skipped, strict=True):
            update.record_result(skipped=bool(each))
        return not all(skipped)

    def _scaled_backward(self, loss: Tensor) -> None:
        assert self.scaler is not None
        torch.autograd.backward(self.scaler.scale(loss))
