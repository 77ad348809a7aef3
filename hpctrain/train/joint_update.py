"""The joint update of the optimizers that step for one loss, under one loss scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hpctrain.metrics.meter import Meter
from hpctrain.train.precision import MasterWeights
from hpctrain.train.update import Update


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

    @property
    def num_skipped(self) -> int:
        """Updates that the optimizers have skipped since the start of the run."""
        return sum(update.num_skipped for update in self.updates)

    @property
    def metrics(self) -> dict[str, float]:
        """Values to log of the last updates."""
        return {name: value for update in self.updates for name, value in update.metrics.items()}

    def begin(self, step: int) -> None:
        """Prepare step ``step``, counted from 0, before its first forward pass."""
        if self._master is not None:
            self._master.begin_step()
        for update in self.updates:
            update.begin(step)

    def __call__(self) -> bool:
        """Update the weights from the accumulated gradients, after the last backward pass, and clear the gradients.

        Returns:
            Whether weights were updated; ranks skip the same updates.
        """
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

    def _scaled_backward(self, loss: Tensor) -> None:
        assert self.scaler is not None
        torch.autograd.backward(self.scaler.scale(loss))
