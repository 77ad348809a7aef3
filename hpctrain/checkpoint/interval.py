"""The interval between saves that loses the least time."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hpctrain.run.ledger import Attempt

PRIOR_S = 24 * 3600.0
"""Assumed mean time between failures before any was observed: one failure a day."""


def mean_time_between_failures_s(attempts: Sequence[Attempt], now: float) -> float:
    """Estimate the mean time between failures from the run's ledger, in seconds; the prior counts as one failure.

    Args:
        attempts: of the run, the current one included.
        now: epoch seconds.
    """
    observed = sum((entry.end_time or now) - entry.start_time for entry in attempts if entry.start_time is not None)
    failures = sum(entry.reason is not None and not entry.reason.meaning.orderly for entry in attempts)
    return (max(observed, 0.0) + PRIOR_S) / (failures + 1)


def best_interval_s(save_cost_s: float, mean_time_between_failures: float) -> float:
    """Return the seconds of training between two saves that lose the least time.

    Young's sqrt(2 d M) (CACM 17(9), 1974) with the higher-order terms of Daly (FGCS 22(3), 2006), d the time that a
    save takes from training and M the mean time between failures. The time of a restart shifts the loss, but not its
    minimum.
    """
    d, m = save_cost_s, mean_time_between_failures
    if d <= 0:
        return 1.0
    if d >= 2 * m:
        return m
    ratio = d / (2 * m)
    return max(1.0, math.sqrt(2 * d * m) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - d)
