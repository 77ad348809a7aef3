"""The spread of a metric over runs that differ in nothing but `seed`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """The mean of the best values of several runs, and how far they lie apart.

    Attributes:
        mean: arithmetic mean.
        deviation: the sample standard deviation, with n - 1 in the denominator; None for one run.
        lowest: the smallest value.
        highest: the largest value.
        count: the number of runs.
    """

    mean: float
    deviation: float | None
    lowest: float
    highest: float
    count: int


def spread_of(values: Sequence[float]) -> Spread:
    """Return the spread of finite values, at least one."""
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return Spread(statistics.mean(values), deviation, min(values), max(values), len(values))
