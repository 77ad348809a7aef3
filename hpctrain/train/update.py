"""One update of the weights: learning rate, loss scale, clipping, the optimizer's step, master weights and average."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hpctrain.config.trainer import Trainer
from hpctrain.train.ema import Ema
from hpctrain.train.learning_rate import LearningRate
from hpctrain.train.precision import MasterWeights


class Clipping:
    """Clips gradients by their total norm, then by value, without waiting for the device.

    Args:
        trainer: gives the bounds, and whether the norm is logged without one.
        optimizer: over the parameters whose gradients are clipped.
    """

    def __init__(self, trainer: Trainer, optimizer: torch.optim.Optimizer) -> None:
        self._norm = trainer.clip_grad_norm
        self._value = trainer.clip_grad_value
        self._measures = trainer.log_grad_norm
        self._parameters = _parameters(optimizer)

    @classmethod
    def configured(cls, trainer: Trainer, optimizer: torch.optim.Optimizer) -> Clipping | None:
        """Make the clipping; None if gradients are neither clipped nor measured."""
        clips = trainer.clip_grad_norm is not None or trainer.clip_grad_value is not None
        return cls(trainer, optimizer) if clips or trainer.log_grad_norm else None

    def __call__(self) -> Tensor | None:
        """Clip the gradients.

        Returns:
            Their 2-norm before clipping, 0-d; None if it is neither bounded nor logged.
        """
        norm = None
        if self._norm is not None:
            norm = nn.utils.clip_grad_norm_(self._parameters, self._norm)
        elif self._measures:
            norm = nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None])
        if self._value is not None:
            nn.utils.clip_grad_value_(self._parameters, self._value)
        return norm


class Update:
    """One optimizer update under a schedule, with the loss scale, master weights and average.

    Args:
        optimizer: over the trained parameters.
        learning_rate: sets the optimizer's learning rates.
        clipping: bounds the gradients; None for no bounds.
        scaler: of the loss, for fp16; else None.
        master: copies gradients and weights between fp32 and half precision; None if there is only one set of weights.
        ema: averages the weights after each update; None for no average.

    Attributes:
        learning_rate: sets the optimizer's learning rates; skipped updates don't advance it.
        num_skipped: updates since the start of the run that were skipped because gradients overflowed.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        learning_rate: LearningRate,
        *,
        clipping: Clipping | None = None,
        scaler: torch.amp.GradScaler | None = None,
        master: MasterWeights | None = None,
        ema: Ema | None = None,
    ) -> None:
        self.learning_rate = learning_rate
        self.num_skipped = 0
        self._optimizer = optimizer
        follows = type(learning_rate).after_update is not LearningRate.after_update
        self._after_update = learning_rate.after_update if follows else None
        self._clipping = clipping
        self._scaler = scaler
        self._master = master
        self._ema = ema
        self._parameters = _parameters(optimizer)
        self._overrides_zero_grad = type(optimizer).zero_grad is not torch.optim.Optimizer.zero_grad
        # a fused optimizer skips on the device; for any other one, the scaler decides whether to call its step
        self._skips_on_device = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        self._stepped = False
        if scaler is not None:
            # GradScaler doesn't report whether it skipped the step
            optimizer.register_step_post_hook(self._note_step)

    @property
    def metrics(self) -> dict[str, float]:
        """Values to log of the last update; in fp16 reading them waits for the device."""
        values = {"train/lr": self.learning_rate.current}
        if self._scaler is not None:
            values["train/loss_scale"] = self._scaler.get_scale()
            values["train/skipped_updates"] = self.num_skipped
        return values

    def begin(self, step: int) -> None:
        """Prepare step ``step``, counted from 0: set its learning rates; skipped updates don't advance the schedule."""
        if self._master is not None:
            self._master.begin_step()
        self.learning_rate.begin(step - self.num_skipped)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss, under the loss scale."""
        torch.autograd.backward(loss if self._scaler is None else self._scaler.scale(loss))

    def __call__(self) -> Tensor | None:
        """Update the weights from the accumulated gradients, and clear these.

        Returns:
            The gradients' norm before clipping; None if it wasn't measured, or the update was skipped. Ranks skip
            the same updates.
        """
        if self._master is not None:
            self._master.end_step()
            self._master.collect_gradients()
        norm = None
        # unscale gradients before clipping, or the bound would depend on the loss scale
        if self._clipping is not None:
            if self._scaler is not None:
                self._scaler.unscale_(self._optimizer)
            norm = self._clipping()
        updated = True
        if self._scaler is None:
            self._optimizer.step()
        else:
            updated = self._step_scaled(self._scaler)
        self._clear_gradients()
        if not updated:
            self.num_skipped += 1
            return None
        if self._master is not None:
            self._master.publish()
        if self._ema is not None:
            self._ema.update()
        if self._after_update is not None:
            self._after_update()
        return norm

    def _step_scaled(self, scaler: torch.amp.GradScaler) -> bool:
        """Step and adapt the scale; return whether the weights were updated."""
        # reading the scale waits for the device; if the scaler decides on the host, it has waited already
        before = scaler.get_scale() if self._skips_on_device else 0.0
        self._stepped = False
        scaler.step(self._optimizer)
        scaler.update()
        return scaler.get_scale() >= before if self._skips_on_device else self._stepped

    def _note_step(self, *_: object) -> None:
        self._stepped = True

    def _clear_gradients(self) -> None:
        if self._overrides_zero_grad:
            self._optimizer.zero_grad(set_to_none=True)
            return
        # torch's own zero_grad does the same inside a profiler record, which costs more than the rest of that function
        for parameter in self._parameters:
            parameter.grad = None


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
