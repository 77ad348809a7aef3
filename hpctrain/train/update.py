"""The updates of one optimizer, and of the optimizers that step together: rates, clipping, loss scale, skipping."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hpctrain.config.trainer import Trainer
from hpctrain.errors import TaskError
from hpctrain.metrics.meter import Meter
from hpctrain.parallel.local_part import local_parts
from hpctrain.parallel.replica import Replica
from hpctrain.train.learning_rate import LearningRate
from hpctrain.train.precision import MasterWeights

if TYPE_CHECKING:
    from hpctrain.train.step import Turn


@dataclass(frozen=True)
class Clipping:
    """Clips gradients by their total norm, then by value, without waiting for the device.

    Attributes:
        max_norm: the bound of the norm; None for no bound.
        max_value: the bound of each element; None for no bound.
        logs_norm: whether the norm is logged without a bound.
        parameters: whose gradients are clipped.
        replica: which has the parameters.
    """

    max_norm: float | None
    max_value: float | None
    logs_norm: bool
    parameters: Sequence[Tensor]
    replica: Replica

    @classmethod
    def configured(cls, trainer: Trainer, optimizer: torch.optim.Optimizer, replica: Replica) -> Clipping | None:
        """Make the clipping; None if gradients are neither clipped nor measured."""
        max_norm, max_value, logs_norm = trainer.clip_grad_norm, trainer.clip_grad_value, trainer.log_grad_norm
        if max_norm is None and max_value is None and not logs_norm:
            return None
        return cls(max_norm, max_value, logs_norm, parameters_of(optimizer), replica)

    def __call__(self) -> Tensor | None:
        """Clip the gradients.

        Returns:
            Their 2-norm before clipping, 0-d; None if it is neither bounded nor logged.
        """
        norm = None
        if self.max_norm is not None or self.logs_norm:
            norm = self.replica.clip(self.parameters, self.max_norm)
        if self.max_value is not None:
            nn.utils.clip_grad_value_(self.parameters, self.max_value)
        return norm


@dataclass(eq=False)
class Update:
    """The updates of one optimizer under a schedule.

    Attributes:
        optimizer: over the parameters that it trains.
        learning_rate: sets the optimizer's learning rates.
        name: of the optimizer among several; empty for the only one.
        clipping: bounds the gradients; None for no bounds.
        scaler: of the loss, for fp16; else None. The optimizers of a turn share it.
        every_steps: steps from one update to the next.
        state_check: called after updates that weren't skipped, until it returns True; None for nothing.
        num_skipped: updates since the start of the run that were skipped because gradients overflowed.
        norm: of the last update's gradients before clipping, 0-d; None if it wasn't measured, or the update was
            skipped.
    """

    optimizer: torch.optim.Optimizer
    learning_rate: LearningRate
    _: KW_ONLY
    name: str = ""
    clipping: Clipping | None = None
    scaler: torch.amp.GradScaler | None = None
    every_steps: int = 1
    state_check: Callable[[], bool] | None = None
    num_skipped: int = field(default=0, init=False)
    norm: Tensor | None = field(default=None, init=False)
    _stepped: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.norm_name = f"train/grad_norm{self._suffix}"
        follows = type(self.learning_rate).after_update is not LearningRate.after_update
        self._after_update = self.learning_rate.after_update if follows else None
        self._parameters = parameters_of(self.optimizer)
        self._overrides_zero_grad = type(self.optimizer).zero_grad is not torch.optim.Optimizer.zero_grad
        # a fused optimizer skips on the device; for any other one, the scaler decides whether to call its step
        self._skips_on_device = bool(getattr(self.optimizer, "_step_supports_amp_scaling", False))
        if self.scaler is not None:
            # GradScaler doesn't report whether it skipped the step
            self.optimizer.register_step_post_hook(self._note_step)

    @property
    def metrics(self) -> dict[str, float]:
        """Values to log of the last update."""
        values = {f"train/lr{self._suffix}": self.learning_rate.current}
        if self.scaler is not None:
            values[f"train/skipped_updates{self._suffix}"] = self.num_skipped
        return values

    def __call__(self, scaler: torch.amp.GradScaler | None = None) -> Tensor | bool:
        """Update the weights from the accumulated gradients, and clear these.

        Args:
            scaler: of the loss. Then gradients that overflowed update nothing, and `record_result` has to be called.

        Returns:
            Whether gradients overflowed, so that the update was skipped; if only the device knows, a 0-d tensor, which
            isn't 0 if they did. `scaler.update()` may overwrite that tensor.
        """
        if self.clipping is not None:
            if scaler is not None:
                # before clipping, or the bound would depend on the loss scale
                scaler.unscale_(self.optimizer)
            self.norm = self.clipping()
        overflowed: Tensor | bool = False
        if scaler is None:
            self.optimizer.step()
        # without a gradient, none of them is trained yet, and the scaler refuses a step
        elif any(parameter.grad is not None for parameter in self._parameters):
            self._stepped = False
            scaler.step(self.optimizer)
            overflowed = self._num_overflows(scaler) if self._skips_on_device else not self._stepped
        if self._overrides_zero_grad:
            self.optimizer.zero_grad(set_to_none=True)
        else:
            # torch's own does the same inside a profiler record, which costs more than the rest of that function
            for parameter in self._parameters:
                parameter.grad = None
        if scaler is None and (self._after_update is not None or self.state_check is not None):
            self.record_result(skipped=False)
        return overflowed

    def record_result(self, *, skipped: bool) -> None:
        """Record whether an update was skipped. Ranks skip the same updates."""
        if skipped:
            self.norm = None
            self.num_skipped += 1
            return
        if self._after_update is not None:
            self._after_update()
        if self.state_check is not None and self.state_check():
            self.state_check = None

    @property
    def _suffix(self) -> str:
        return f"/{self.name}" if self.name else ""

    def _num_overflows(self, scaler: torch.amp.GradScaler) -> Tensor | bool:
        """Return the number of devices with overflows, 0-d; False if the scaler checked no gradients."""
        scale = scaler._scale
        assert scale is not None
        by_device: dict[torch.device, Tensor] = scaler._per_optimizer_states[id(self.optimizer)]["found_inf_per_device"]
        overflows = [overflow.to(scale.device, non_blocking=True) for overflow in by_device.values()]
        if len(overflows) == 1:
            return overflows[0]
        return torch.stack(overflows).sum() if overflows else False

    def _note_step(self, *_: object) -> None:
        self._stepped = True


@dataclass(eq=False)
class JointUpdate:
    """The updates of the optimizers that step for one loss.

    Attributes:
        updates: one for each optimizer.
        meter: collects the norms of the gradients that are measured.
        scaler: of the loss, for fp16; else None.
        master: copies gradients and weights between fp32 and half precision; None if there is only one set of weights.
        after_backward: called with this object after the last backward pass of a step, before gradients are clipped;
            None for nothing.
        backward: adds the gradients of a loss, under the loss scale.
    """

    updates: Sequence[Update]
    meter: Meter
    _: KW_ONLY
    scaler: torch.amp.GradScaler | None = None
    master: MasterWeights | None = None
    after_backward: Callable[[JointUpdate], None] | None = None
    _loss_scale: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.backward = torch.autograd.backward if self.scaler is None else self._scaled_backward

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
        """Prepare step ``step``, counted from 0, before its first forward pass: set its learning rates."""
        if self.master is not None:
            self.master.begin_step()
        for update in self.updates:
            # skipped updates don't advance the schedule
            update.learning_rate.begin(step - update.num_skipped * update.every_steps)

    def __call__(self, gradient_factor: float = 1.0) -> bool:
        """Update the weights from the accumulated gradients, after the last backward pass, and clear the gradients.

        Args:
            gradient_factor: factor of the gradients; with 0, nothing is updated.

        Returns:
            Whether weights were updated; ranks skip the same updates.
        """
        if self.master is not None:
            self.master.end_step()
            self.master.collect_gradients()
        if not gradient_factor:
            # weights, momentum and moving averages don't change; the schedule counts the step
            for update in self.updates:
                update.optimizer.zero_grad(set_to_none=True)
            return False
        if gradient_factor != 1.0:
            self._rescale(gradient_factor)
        if self.after_backward is not None:
            self.after_backward(self)
        updated = True
        if self.scaler is not None:
            updated = self._update_scaled(self.scaler)
        else:
            for update in self.updates:
                update()
        for update in self.updates:
            if update.norm is not None:
                self.meter.add_mean(update.norm_name, update.norm, 1)
        if updated and self.master is not None:
            self.master.publish()
        return updated

    def _rescale(self, factor: float) -> None:
        parameters = [parameter for update in self.updates for parameter in parameters_of(update.optimizer)]
        parts = local_parts(parameter.grad for parameter in parameters if parameter.grad is not None)
        if parts:
            torch._foreach_mul_(parts, factor)

    def _update_scaled(self, scaler: torch.amp.GradScaler) -> bool:
        """Update the weights whose gradients didn't overflow, then the loss scale; return whether any were updated."""
        # With fused optimizers the host waits once: one transfer reads which updates were skipped, and the new scale.
        # For other optimizers, the scaler itself waits before each `step`; the scale isn't read then, since that would
        # wait for the update.
        skipped = [update(scaler) for update in self.updates]
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
            skipped = [bool(next(read)) if isinstance(result, Tensor) else result for result in skipped]
        for update, result in zip(self.updates, skipped, strict=True):
            update.record_result(skipped=bool(result))
        return not all(skipped)

    def _scaled_backward(self, loss: Tensor) -> None:
        assert self.scaler is not None
        torch.autograd.backward(self.scaler.scale(loss))


@contextmanager
def unknown_optimizers_refused(turns: Sequence[Turn]) -> Iterator[None]:
    """Context manager in which an optimizer that steps while a task computes a loss raises a TaskError.

    Args:
        turns: of the training, whose own optimizers may step.
    """
    optimizer_ids = {id(update.optimizer) for turn in turns for update in turn.update.updates}

    def check(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if id(optimizer) in optimizer_ids:
            return
        for turn in turns:
            if turn.is_computing:
                raise TaskError(
                    f"{turn.loss.method} steps an optimizer of its own ({type(optimizer).__name__}), whose gradients "
                    "the ranks don't share and whose state no checkpoint has: name it in the configuration "
                    "(optimizer=named), with a method of the task that returns its loss"
                )

    handle = register_optimizer_step_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the parameters of all groups of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
