"""Retry operations that may fail for a while, such as during the failover of a controller or a file system."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

log = logging.getLogger("hpctrain.retry")


def retry(
    act: Callable[[], T],
    *,
    on: type[Exception] | tuple[type[Exception], ...],
    for_s: float,
    every_s: float = 1.0,
    slowing_to_s: float | None = None,
    problem: str,
) -> T:
    """Call a function until it succeeds.

    Args:
        act: the function; it may be called many times.
        on: exceptions that are worth a retry.
        for_s: seconds after which the last exception is raised; 0 calls the function once.
        every_s: seconds between the first two calls.
        slowing_to_s: upper bound of the pause, which doubles after each call; None keeps the pause constant.
        problem: what failed, for the log.

    Returns:
        What `act` returns.

    Raises:
        Exception: the last one in `on`, after `for_s`; any other at once.
    """
    deadline = time.monotonic() + for_s
    while True:
        try:
            return act()
        except on as error:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                log.warning("%s: %s", problem, error)
                raise
            log.warning("%s: %s; retrying for %.0f s", problem, error, left_s)
        time.sleep(min(every_s, left_s))
        every_s = max(every_s, min(2 * every_s, slowing_to_s or every_s))
