"""Average the weights of several steps: stochastic weight averaging."""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hpctrain.callbacks.callback import Callback
from hpctrain.callbacks.training import Training
from hpctrain.files import write_atomic
from hpctrain.phrases import counted

FILE_NAME = "averaged.pt"
"""In the run directory; `init_from` reads it."""

log = logging.getLogger("hpctrain.train")


class AverageWeights(Callback):
    """Averages weights over steps, and writes the average when the run ends (Izmailov et al., UAI 2018).

    Buffers of floating-point and complex numbers are averaged too; others are those of the last step. A step
    whose update fp16 skipped counts like the others, with the weights that it left unchanged.

    Args:
        start_fraction: completed part of the run, from 0 to 1, after which it begins.
        every_steps: steps between the weights that are averaged.
        num_last: average only the last so many; None for all.
    """

    def __init__(self, start_fraction: float = 0.75, every_steps: int = 1, num_last: int | None = None) -> None:
        self.start_fraction = start_fraction
        self.every_steps = every_steps
        self.num_last = num_last
        self.count = 0
        self.terms: list[dict[str, Tensor]] = []

    def on_start(self, training: Training) -> None:
        """Put restored averages where the weights are: the same device computes the same digits."""
        if training.rank:
            # every rank gets the state, and only rank zero averages
            self.terms = []
        weights = training.weights()
        self.terms = [{name: value.to(weights[name].device) for name, value in term.items()} for term in self.terms]

    @torch.no_grad()
    def after_step(self, training: Training) -> None:
        """Take the weights into the average, if it is their turn."""
        position = training.position
        if training.rank or position.progress <= self.start_fraction or position.step % self.every_steps:
            return
        weights = {name: value for name, value in training.weights().items() if _is_averaged(value)}
        self.count += 1
        if self.num_last is not None:
            self.terms = [*self.terms, {name: value.clone() for name, value in weights.items()}][-self.num_last :]
        elif not self.terms:
            # copy: without a conversion, `to` returns the weight itself
            self.terms = [{name: value.to(_accumulator_dtype(value), copy=True) for name, value in weights.items()}]
        else:
            for name, average in self.terms[0].items():
                average.lerp_(weights[name].to(average.dtype), 1 / self.count)

    def on_end(self, training: Training) -> None:
        """Write the average."""
        if training.rank:
            return
        if not self.terms:
            log.warning(
                "average_weights: no weights were averaged, and %s is not written: the run ended at %.0f%% of its "
                "steps (start_fraction=%g, every_steps=%d)",
                *(FILE_NAME, 100 * training.position.progress, self.start_fraction, self.every_steps),
            )
            return
        means = {
            name: torch.stack([weights[name].to(_accumulator_dtype(first)) for weights in self.terms]).mean(0)
            for name, first in self.terms[0].items()
        }
        weights = {
            name: means[name].to(value.dtype).cpu() if name in means else value.cpu()
            for name, value in training.weights().items()
        }
        buffer = io.BytesIO()
        torch.save(weights, buffer)
        write_atomic(training.run_dir / FILE_NAME, buffer.getvalue())
        number = self.count if self.num_last is None else len(self.terms)
        log.info("the average over the weights of %s is in %s", counted(number, "step"), training.run_dir / FILE_NAME)

    def state_dict(self) -> dict[str, Any]:
        """See `Callback`."""
        return {"count": self.count, "kept": self.terms}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Callback`."""
        self.count = state["count"]
        self.terms = state["kept"]


def _is_averaged(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _accumulator_dtype(value: Tensor) -> torch.dtype:
    return torch.complex128 if value.is_complex() else torch.float64
