"""Times the parts of a step."""

from __future__ import annotations

from torch import nn

from hpctrain.train.profiling.last_gradient import LastGradient
from hpctrain.train.profiling.stopwatch import Stopwatch


class PartTimer:
    """Times ``data``, ``forward``, ``backward``, ``gradient_sync`` and ``optimizer``; a `StepTimer` of `TrainStep`.

    With several ranks the time after a rank's own last gradient, in the backward pass that synchronises, is
    ``gradient_sync``.

    Args:
        model: of the step.
        watch: takes the marks.
    """

    def __init__(self, model: nn.Module, watch: Stopwatch) -> None:
        self._watch = watch
        self._last_gradient = LastGradient(model.parameters())

    def begin(self) -> None:
        """See `StepTimer`."""
        self._watch.begin()

    def data_done(self) -> None:
        """See `StepTimer`."""
        self._watch.mark("data")

    def forward_done(self, *, synchronises: bool) -> None:
        """See `StepTimer`."""
        self._watch.mark("forward")
        if synchronises:
            self._last_gradient.watch(lambda: self._watch.mark("backward"))

    def backward_done(self) -> None:
        """See `StepTimer`."""
        self._watch.mark("gradient_sync" if self._last_gradient.settle() else "backward")

    def update_done(self) -> None:
        """See `StepTimer`."""
        self._watch.mark("optimizer")
