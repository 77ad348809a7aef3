"""A user's program in which a rank trains: it outlives the attempt, and the attempt's error is its own."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpctrain.rank.stop_request import StopRequest


@dataclass(slots=True)
class HostProgram:
    """What a program and the rank that trains in it know of each other.

    Attributes:
        stop: the rank's request to stop.
        error: the error that ended the attempt; None after an end in good order.
    """

    stop: StopRequest = field(default_factory=StopRequest)
    error: BaseException | None = None
