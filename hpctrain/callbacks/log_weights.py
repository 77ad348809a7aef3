"""Log norms and histograms of weights and gradients."""

from __future__ import annotations

from fnmatch import fnmatchcase

from torch import Tensor

from hpctrain.callbacks.callback import Callback
from hpctrain.callbacks.training import Training
from hpctrain.parallel.local_part import whole


class LogWeights(Callback):
    """Logs the 2-norm of each weight and gradient, and how their elements are distributed.

    Args:
        every_steps: steps between records.
        histograms: log histograms beside the norms.
        match: names of the parameters, with * and ?.
    """

    def __init__(self, every_steps: int = 100, *, histograms: bool = True, match: str = "*") -> None:
        self.every_steps = every_steps
        self.histograms = histograms
        self.match = match

    def after_backward(self, training: Training) -> None:
        """Log weights as the step found them, and the gradients that change them."""
        # of rank zero: all ranks have the same, or compute it together if they share the model
        if (training.position.step + 1) % self.every_steps or not training.takes_part:
            return
        scale = training.loss_scale
        for name, parameter in training.parameters.items():
            if parameter.grad is not None and fnmatchcase(name, self.match):
                self._log(training, f"weights/{name}", parameter.detach())
                self._log(training, f"gradients/{name}", parameter.grad / scale if scale != 1 else parameter.grad)

    def _log(self, training: Training, name: str, values: Tensor) -> None:
        values = whole(values)
        if training.rank:
            return
        training.log.scalar(f"{name}/norm", values.float().norm())
        if self.histograms:
            training.log.histogram(name, values)
