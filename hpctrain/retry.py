"""Patience with a file system that refuses for a while: it fails over, or a node has yet to mount it for writing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from hpctrain.errors import RunDirectoryError

RETRY_S = 1.0

T = TypeVar("T")

log = logging.getLogger("hpctrain.launch")


def until_it_can(act: Callable[[], T], patience_s: float, complaint: str) -> T:
    """What `act` returns, tried anew while the file system refuses.

    Args:
        act: may be called often.
        patience_s: how long in all, in seconds.
        complaint: what can't be done, for the log.

    Raises:
        OSError: it refused to the end.
        RunDirectoryError: likewise.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return act()
        except (OSError, RunDirectoryError) as error:
            log.warning("%s: %s", complaint, error)
            if time.monotonic() >= deadline:
                raise
        time.sleep(min(RETRY_S, patience_s))
