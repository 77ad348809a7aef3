"""The step whose parts are timed."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from hpctrain.data.loader import MicroBatch
from hpctrain.train.profiling.last_gradient import LastGradient
from hpctrain.train.profiling.stopwatch import Stopwatch
from hpctrain.train.step import TrainStep


class TimedStep(TrainStep):
    """The same step, with a mark after each of its parts: one state, two ways to go through it.

    The parts are ``data``, ``forward``, ``backward``, ``gradient_sync`` and ``optimizer``. With several ranks what
    follows a rank's own last gradient, in the backward that synchronises, is ``gradient_sync``.

    Args:
        plain: the step that is timed now and then.
        watch: takes the marks.
    """

    def __init__(self, plain: TrainStep, watch: Stopwatch) -> None:
        # what a step changes must be the same for both: one dictionary
        self.__dict__ = plain.__dict__
        self._watch = watch
        self._last_gradient = LastGradient(self._model.parameters())

    def __call__(self, step: int, micro_batches: Iterator[MicroBatch]) -> None:
        """Do step ``step``, counted from 0; collective."""
        self._watch.begin()
        super().__call__(step, self._marked(micro_batches))

    def _marked(self, micro_batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        for micro_batch in micro_batches:
            self._watch.mark("data")
            yield micro_batch

    def _loss(self, micro_batch: MicroBatch) -> Tensor:
        loss = super()._loss(micro_batch)
        self._watch.mark("forward")
        if self._replica is not None and micro_batch.is_last:
            self._last_gradient.watch(lambda: self._watch.mark("backward"))
        return loss

    def _backward(self, micro_batch: MicroBatch) -> None:
        super()._backward(micro_batch)
        self._watch.mark("gradient_sync" if self._last_gradient.settle() else "backward")

    def _update(self) -> None:
        super()._update()
        self._watch.mark("optimizer")
