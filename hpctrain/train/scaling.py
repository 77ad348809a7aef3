"""An update under a loss scale: made, or skipped for an overflow."""

from __future__ import annotations

import torch


class ScaledUpdate:
    """The optimizer's step by way of the GradScaler, which says whether it was made.

    With most optimizers the scaler itself waits for the device, to know whether to call the step: then nothing more is
    waited for. A fused one decides on the device, and leaves its decision in the scale.

    Args:
        scaler: of the run.
        optimizer: over the weights whose gradients are scaled.
    """

    def __init__(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        self._scaler, self._optimizer = scaler, optimizer
        self._on_device = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        self._called = False
        optimizer.register_step_post_hook(self._note)

    def __call__(self) -> bool:
        """Step and update the scale; whether the weights were updated."""
        scaler = self._scaler
        if self._on_device:
            before = scaler.get_scale()
            scaler.step(self._optimizer)
            scaler.update()
            return scaler.get_scale() >= before
        self._called = False
        scaler.step(self._optimizer)
        scaler.update()
        return self._called

    def _note(self, *_: object) -> None:
        self._called = True
