"""Progress on standard error while many runs are prepared, so that a large sweep isn't silent."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

SILENT_S = 2.0
"""Seconds before the first line, and between lines."""

Item = TypeVar("Item")


def with_progress(items: Sequence[Item], done: str, clock: Callable[[], float] = time.monotonic) -> Iterator[Item]:
    """Yield the items, and print how many are done every `SILENT_S` seconds.

    Args:
        items: such as the runs of a sweep.
        done: the verb for finished items, such as `composed`.
        clock: seconds.
    """
    printed_at = clock()
    for number, item in enumerate(items):
        if clock() - printed_at >= SILENT_S:
            printed_at = clock()
            print(f"{number} of {len(items)} runs {done}", file=sys.stderr, flush=True)
        yield item
