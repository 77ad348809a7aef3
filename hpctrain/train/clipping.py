"""Bounds on a step's gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hpctrain.config.trainer import Trainer


class Clipping:
    """Clips by the norm of all gradients together, then by value; nothing of it waits for a device.

    Args:
        parameters: whose gradients.
        norm: largest 2-norm, None for no bound.
        value: largest absolute value of any element, None for no bound.
        measure: whether the norm is of interest without a bound.
    """

    def __init__(
        self, parameters: Sequence[Tensor], *, norm: float | None, value: float | None = None, measure: bool = False
    ) -> None:
        self._parameters, self._norm, self._value = parameters, norm, value
        self._measure = measure

    @classmethod
    def of(cls, trainer: Trainer, optimizer: torch.optim.Optimizer) -> Clipping | None:
        """What is configured; None where gradients are neither clipped nor measured."""
        norm, value, measure = trainer.clip_grad_norm, trainer.clip_grad_value, trainer.log_grad_norm
        if norm is None and value is None and not measure:
            return None
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return cls(parameters, norm=norm, value=value, measure=measure)

    def __call__(self) -> Tensor | None:
        """Clip; the 2-norm before, 0-d, where it is known."""
        norm = None
        if self._norm is not None:
            norm = nn.utils.clip_grad_norm_(self._parameters, self._norm)
        elif self._measure:
            norm = nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None])
        if self._value is not None:
            nn.utils.clip_grad_value_(self._parameters, self._value)
        return norm
