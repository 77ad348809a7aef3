"""Where the time of one step goes: a mark after each part, by the host's clock or by events in a GPU's stream."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

MAX_WAITING = 8
"""Steps whose events may be unread; beyond it the oldest is given up."""


class Stopwatch(Protocol):
    """Times the parts of single steps."""

    def begin(self) -> None:
        """A step begins."""
        ...

    def mark(self, part: str) -> None:
        """What was done since the last mark was ``part``; a part may come several times."""
        ...

    def take(self) -> list[dict[str, float]]:
        """Seconds by part of each step whose times are known by now; each step is given once."""
        ...


class HostStopwatch:
    """By the host's clock, for a device that has done its work when the call returns.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._marks: list[tuple[str, float]] = []

    def begin(self) -> None:
        """See `Stopwatch`."""
        self._marks = [("", self._clock())]

    def mark(self, part: str) -> None:
        """See `Stopwatch`."""
        self._marks.append((part, self._clock()))

    def take(self) -> list[dict[str, float]]:
        """See `Stopwatch`."""
        marks, self._marks = self._marks, []
        laps: dict[str, float] = {}
        for (_, before), (part, now) in itertools.pairwise(marks):
            laps[part] = laps.get(part, 0.0) + now - before
        return [laps] if laps else []


class DeviceStopwatch:
    """By events in the current stream of a CUDA device, which nobody waits for.

    The time between two events is the device's, idle time included: of the part "data" nothing else is in it.

    Args:
        device: whose stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps: deque[list[tuple[str, torch.cuda.Event]]] = deque(maxlen=MAX_WAITING)

    def begin(self) -> None:
        """See `Stopwatch`."""
        self._steps.append([("", self._event())])

    def mark(self, part: str) -> None:
        """See `Stopwatch`."""
        self._steps[-1].append((part, self._event()))

    def take(self) -> list[dict[str, float]]:
        """See `Stopwatch`."""
        found = []
        while self._steps and self._steps[0][-1][1].query():  # type: ignore[no-untyped-call]  # torch leaves it untyped
            marks = self._steps.popleft()
            laps: dict[str, float] = {}
            for (_, before), (part, now) in itertools.pairwise(marks):
                laps[part] = laps.get(part, 0.0) + before.elapsed_time(now) / 1000
            found.append(laps)
        return found

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        event.record(torch.cuda.current_stream(self._device))
        return event


def stopwatch(device: torch.device) -> Stopwatch:
    """The one that is right for a device."""
    return DeviceStopwatch(device) if device.type == "cuda" else HostStopwatch()
