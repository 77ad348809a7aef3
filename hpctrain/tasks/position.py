"""The position of a training: step, epoch and progress."""

from __future__ import annotations


class Position:
    """The step, epoch and progress of a run, the same on every rank.

    Args:
        steps_per_epoch: steps that one pass over the samples takes.
        total_steps: the last step of the run.

    Attributes:
        step: completed steps; 0 outside of a training. Only the trainer sets it.
        epoch: completed passes over the data.
        progress: completed part of the run, from 0 to 1.
    """

    # the loop sets `step` after each step: an attribute and nothing else
    __slots__ = ("_steps_per_epoch", "_total_steps", "step")

    def __init__(self, steps_per_epoch: int = 1, total_steps: int = 1) -> None:
        self.step = 0
        self._steps_per_epoch = steps_per_epoch
        self._total_steps = total_steps

    @property
    def epoch(self) -> int:
        """Completed passes over the data."""
        return self.step // self._steps_per_epoch

    @property
    def progress(self) -> float:
        """Completed part of the run, from 0 to 1."""
        return self.step / self._total_steps
