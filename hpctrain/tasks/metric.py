"""Metrics over all held-out samples: metric objects, and values per sample."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

Reduction: TypeAlias = Literal["sum", "min", "max", "cat"]
REDUCTIONS: tuple[Reduction, ...] = ("sum", "min", "max", "cat")


@dataclass(frozen=True, slots=True)
class PerSample:
    """A value for each sample of a batch: `Task.evaluate` returns it along with its sums, for `Task.compute_metrics`.

    Attributes:
        values: a tensor of shape [n, ...] for a batch of n samples, of any dtype, on any device; or, if the shapes of
            samples differ, n tensors with the same number of dimensions, such as the boxes of each image.
    """

    values: Tensor | Sequence[Tensor]


class Metric(ABC):
    """A metric whose states the trainer adds up over batches and ranks: the base class of your own.

    `Task.build_metrics` returns it, and `Task.evaluate` calls `update`. The trainer moves the states to the rank's
    device, resets them before each evaluation, reduces them over all ranks, and calls `compute` on rank zero.

    Example:
        The largest error, and a histogram::

            class Errors(Metric):
                def __init__(self):
                    self.add_state("largest", torch.tensor(0.0), reduce="max")
                    self.add_state("counts", torch.zeros(10), reduce="sum")

                def update(self, errors):
                    self.largest = torch.maximum(self.largest, errors.max())
                    self.counts += errors.histc(10, 0, 1)

                def compute(self):
                    return {"largest": self.largest, "small": self.counts[0] / self.counts.sum()}
    """

    def add_state(self, name: str, default: Tensor | None = None, *, reduce: Reduction) -> None:
        """Declare a state, which becomes an attribute; call it in the constructor.

        Args:
            name: of the attribute.
            default: value at the start of an evaluation; it counts once, and not once per rank. None for `cat`.
            reduce: how the states of the ranks become one: `sum`, `min` or `max` of each element; or `cat`: the
                attribute is a list, to which `update` appends tensors, and `compute` finds those of all ranks in it.

        Raises:
            ValueError: the reduction is unknown, the default doesn't fit it, or the name is taken.
        """
        if reduce not in REDUCTIONS:
            raise ValueError(f"reduce={reduce!r}: expected {', '.join(REDUCTIONS)}")
        if (default is None) is not (reduce == "cat"):
            expected = "no default: the state is a list" if reduce == "cat" else "a tensor as default"
            raise ValueError(f"the state {name!r} with reduce={reduce!r} needs {expected}")
        if hasattr(self, name):
            raise ValueError(f"{type(self).__name__} has an attribute {name!r} already: choose another name")
        self.defaults[name] = None if default is None else default.detach().clone()
        self.reductions[name] = reduce
        self._set_to_default(name)

    @property
    def defaults(self) -> dict[str, Tensor | None]:
        """The states' values at the start of an evaluation, by name; None for a list."""
        # not in a constructor, which a subclass may forget to call
        defaults: dict[str, Tensor | None] = self.__dict__.setdefault("_defaults", {})
        return defaults

    @property
    def reductions(self) -> dict[str, Reduction]:
        """The reduction of each state, by name."""
        reductions: dict[str, Reduction] = self.__dict__.setdefault("_reductions", {})
        return reductions

    @abstractmethod
    def update(self, *arguments: Any, **options: Any) -> None:
        """Add a batch to the states; `Task.evaluate` calls it, with whatever arguments it needs."""

    @abstractmethod
    def compute(self) -> Any:
        """Compute the metric from the states of all ranks; called on rank zero alone.

        Returns:
            A number, logged as `eval/NAME`; or several as a dict, a tensor of one dimension or a list, which are logged
            as `eval/NAME/KEY`. A tensor with one element is a number.
        """

    def reset(self) -> None:
        """Give each state its default."""
        for name in self.defaults:
            self._set_to_default(name)

    def to(self, device: torch.device) -> None:
        """Move the defaults and the states to a device."""
        for name, default in self.defaults.items():
            state = getattr(self, name)
            if default is None:
                setattr(self, name, [tensor.to(device) for tensor in state])
            else:
                self.defaults[name] = default.to(device)
                setattr(self, name, state.to(device))

    def _set_to_default(self, name: str) -> None:
        default = self.defaults[name]
        setattr(self, name, [] if default is None else default.clone())

    def __getattr__(self, name: str) -> Any:
        # only called for missing attributes; declares to type checkers that there are states
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
