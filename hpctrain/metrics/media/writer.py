"""The thread that encodes and writes media in the background."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from hpctrain.metrics.media.captured import Captured
from hpctrain.metrics.media.files import MediaFiles, Medium

logger = logging.getLogger(__name__)

MAX_QUEUED_BYTES = 256 * 2**20
"""Bytes of copied media that may wait for the thread; the next call waits until there is room.

Media that come faster than they can be written slow the training down: none is left out, or a run that was interrupted
would have other media than one that wasn't.
"""
MAX_QUEUED = 256
"""Media that may wait for the thread: a save waits for them, and a slow disk takes 20 ms for each."""


class MediaWriter:
    """Encodes media, writes their files, and passes them on.

    Args:
        files: to write.
        receivers: called with each medium after it is written, in the thread; they don't raise.
    """

    def __init__(self, files: MediaFiles, receivers: Sequence[Callable[[Medium], None]] = ()) -> None:
        self._files = files
        self._receivers = receivers
        self._queue: deque[tuple[int, float, str, Captured]] = deque()
        self._changed = threading.Condition()
        self._queued_bytes = 0
        self._ends = False
        self._thread: threading.Thread | None = None

    def put(self, step: int, name: str, captured: Captured) -> None:
        """Queue a medium.

        Args:
            step: to which it belongs.
            name: as logged, such as `eval/samples`.
            captured: its content.
        """
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="media", daemon=True)
                self._thread.start()
            self._changed.wait_for(lambda: self._has_room(captured))
            self._queue.append((step, time.time(), name, captured))
            self._queued_bytes += captured.num_bytes
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until all media are written and durable; a failure of the file system is a warning."""
        if self._thread is not None:
            with self._changed:
                self._changed.wait_for(lambda: not self._queue)
            self._files.sync()

    def close(self) -> None:
        """Write what is queued, and end the thread."""
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._files.close()

    def _has_room(self, captured: Captured) -> bool:
        if not self._queue:
            return True
        return len(self._queue) < MAX_QUEUED and self._queued_bytes + captured.num_bytes <= MAX_QUEUED_BYTES

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._ends)
                if not self._queue:
                    return
                step, logged_at, name, captured = self._queue[0]
            try:
                medium = Medium(step, logged_at, name, captured.kind, captured.encode())
                self._files.write(medium)
                for receive in self._receivers:
                    receive(medium)
            except Exception:  # a medium isn't worth a run
                logger.warning("%s of step %d could not be written", name, step, exc_info=True)
            with self._changed:
                # taken from the queue only now: `flush` waits until it is written
                self._queue.popleft()
                self._queued_bytes -= captured.num_bytes
                self._changed.notify_all()
