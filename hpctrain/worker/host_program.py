"""A user's program in which a rank trains: it outlives the attempt, and the attempt's error is its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hpctrain.distributed.stop_request import StopRequest
from hpctrain.run.directory import RunDirectory

_training: dict[Path, HostProgram] = {}


@dataclass(slots=True)
class HostProgram:
    """What a program and the rank that trains in it know of each other.

    Attributes:
        stop: the rank's request to stop.
        error: the error that ended the attempt; None after an end in good order.
    """

    stop: StopRequest = field(default_factory=StopRequest)
    error: BaseException | None = None

    @contextmanager
    def trains(self, directory: RunDirectory) -> Iterator[None]:
        """Inside the context, `training` finds this program by the run."""
        _training[directory.path] = self
        try:
            yield
        finally:
            del _training[directory.path]

    @staticmethod
    def training(directory: RunDirectory) -> HostProgram | None:
        """Return the program that trains a run, if it is this process."""
        return _training.get(directory.path)
