"""The interval between saves that loses the least time."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from hpctrain.run.ledger import Attempt

log = logging.getLogger("hpctrain.checkpoint")

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


def auto_interval_s(stall_s: float, takes_s: float, attempts: Sequence[Attempt], now: float) -> float:
    """Choose, and log, the seconds of training until the next save.

    Args:
        stall_s: seconds for which a save stops training.
        takes_s: seconds from the beginning of a save until it is durable.
        attempts: of the run, including the current one.
        now: epoch seconds.
    """
    mtbf_s = mean_time_between_failures_s(attempts, now)
    # one save at a time: the next one isn't due before this one is written
    interval_s = max(best_interval_s(stall_s, mtbf_s), takes_s)
    log.info(
        "a save every %.0f s: it costs %.2f s, is written within %.1f s, and one failure in %.1f h is expected",
        interval_s,
        stall_s,
        takes_s,
        mtbf_s / 3600,
    )
    return interval_s
