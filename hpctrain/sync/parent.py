"""Rank zero, as its sender process sees it: through a pipe, and by its process id."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable

LOOK_EVERY_S = 1.0
"""Seconds between two looks whether the parent lives: processes that it forked may hold its end of the pipe open."""


class Parent:
    """The process that started this one, watched by a thread: a call of a service's client may take minutes.

    Args:
        descriptor: of a pipe: the parent writes `COMPLETED` into it, and its end means that it left.
        on_left: called in the thread once the parent has left without completing the run.

    Attributes:
        end: `COMPLETED` or `LEFT`, once the training has ended; None before.
    """

    COMPLETED = "completed"
    LEFT = "left"

    def __init__(self, descriptor: int, on_left: Callable[[], object] = lambda: None) -> None:
        self.end: str | None = None
        self._descriptor = descriptor
        self._on_left = on_left
        self._pid = os.getppid()
        self._ended = threading.Event()
        threading.Thread(target=self._watch, name="parent", daemon=True).start()

    def wait(self, seconds: float) -> None:
        """Wait, but no longer than until the parent's training ends."""
        self._ended.wait(seconds)

    def _watch(self) -> None:
        received = b""
        while True:
            ready, _, _ = select.select([self._descriptor], [], [], LOOK_EVERY_S)
            data = os.read(self._descriptor, 64) if ready else b""
            received += data
            if received.startswith(self.COMPLETED.encode()):
                self.end = self.COMPLETED
                break
            if (ready and not data) or os.getppid() != self._pid:
                self.end = self.LEFT
                self._on_left()
                break
        self._ended.set()
