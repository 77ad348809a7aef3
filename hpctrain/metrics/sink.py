"""What everything that takes metrics has in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Sink(Protocol):
    """A place for metrics; only rank zero has any. Nothing here is collective.

    Metric names: ``train/loss``, ``train/lr``, ``train/epoch``, ``eval/loss``, ``eval/accuracy``,
    ``throughput/samples_per_s``, and what a task adds.
    """

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the values of a step. Steps never go back within an attempt; one step may come in several calls."""
        ...

    def flush(self) -> None:
        """Make what was logged durable; called before a checkpoint is published, so that a resume misses no record."""
        ...

    def close(self) -> None:
        """Flush and release; nothing is logged after it."""
        ...
