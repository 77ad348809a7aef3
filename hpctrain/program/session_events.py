"""What a program reports: events that it writes into a named pipe, as lines of JSON."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.files import parse_json
from hpctrain.run.record_fields import COUNT, FLAG, NUMBER, PATH, TEXT, FieldType, describe_wrong_field

FILE_NAME = "events"
CAPACITY_BYTES = 2**20
"""Of the pipe, if the system grants it: a program that reports faster than it is read loses reports of steps."""
LONGEST_LINE_BYTES = 2**16
NONFINITE = ("nan", "inf", "-inf")
STEP = FieldType("a whole number from 0 to 2**53", lambda value: COUNT.accepts(value) and value <= 2**53)
"""Not every reader of JSON keeps larger numbers exact."""
_FIELDS = {
    "start": {"pid": COUNT, "total_steps": STEP, "stacks": FLAG},
    "step": {"step": STEP, "pid": COUNT},
    "saved": {"step": STEP, "path": PATH},
    "stopping": {"cause": TEXT},
    "done": {},
    "exit": {"pid": COUNT},
}
_REQUIRED = {"start": ("pid",), "step": ("step",), "saved": ("step", "path"), "exit": ("pid",)}

log = logging.getLogger("hpctrain.program")


@dataclass(slots=True)
class Event:
    """One report of a program.

    Attributes:
        kind: `start`, `step`, `saved`, `stopping`, `done` or `exit`.
        rank: of the process that reports; None if it doesn't say.
        fields: those of its kind.
        metrics: of a step, by name.
    """

    kind: str
    rank: int | None
    fields: dict[str, Any]
    metrics: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def parse(cls, line: bytes) -> Event | None:
        """The event in a line; None if the line is malformed."""
        try:
            fields = parse_json(line)
        except ValueError:
            return None
        if not isinstance(fields, dict):
            return None
        kind, rank = str(fields.get("event")), fields.get("rank")
        types = _FIELDS.get(kind)
        if types is None or describe_wrong_field(fields, types, _REQUIRED.get(kind, ())):
            return None
        if rank is not None and not COUNT.accepts(rank):
            return None
        metrics = _metrics(fields.get("metrics") or {})
        return None if metrics is None else cls(kind, rank, fields, metrics)


def _metrics(found: object) -> dict[str, float] | None:
    if not isinstance(found, dict):
        return None
    values = {}
    for name, value in found.items():
        if value in NONFINITE or (isinstance(value, float) and not math.isfinite(value)):
            values[name] = float(value)
        elif NUMBER.accepts(value):
            values[name] = value
        else:
            return None
    return values


class EventPipe:
    """The pipe of a session, which this process keeps open so that programs may come and go.

    Args:
        folder: of the session.

    Attributes:
        descriptor: readable when events wait in the pipe.
        waiting: events that have been read, in their order; who attends to one takes it away.
    """

    def __init__(self, folder: Path) -> None:
        os.mkfifo(folder / FILE_NAME, 0o600)
        self.descriptor = os.open(folder / FILE_NAME, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        with contextlib.suppress(OSError):
            fcntl.fcntl(self.descriptor, fcntl.F_SETPIPE_SZ, CAPACITY_BYTES)
        self._capacity = fcntl.fcntl(self.descriptor, fcntl.F_GETPIPE_SZ)
        self.waiting: deque[Event] = deque()
        self._rest = b""
        self._warned = False

    def read(self) -> bool:
        """Read all that the pipe holds; return whether it was so much that the next call should come at once."""
        try:
            data = os.read(self.descriptor, self._capacity)
        except BlockingIOError:
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LONGEST_LINE_BYTES:
            self._rest = b""
            self._warn(data)
        for line in lines:
            event = Event.parse(line)
            if event is not None:
                self.waiting.append(event)
            elif line.strip():
                self._warn(line)
        return len(data) > self._capacity // 2

    def close(self) -> None:
        """Close it: a program that still reports gets an error."""
        os.close(self.descriptor)

    def _warn(self, line: bytes) -> None:
        if not self._warned:
            log.warning("a report of the program is malformed, and ignored like others of its kind: %.200r", line)
            self._warned = True


@dataclass(slots=True)
class Progress:
    """What the processes of one rank have reported so far.

    Attributes:
        started: whether a session has begun.
        step: completed steps, as the lowest rank among them reported last.
        first_step: the first reported one; None before it.
        total_steps: of the whole run, if reported.
        done: whether the program said that the run is complete.
        stopping: why the program is stopping by itself; empty if it isn't.
        changes: how often it made progress.
        reporters: the processes that began a session.
        with_stacks: the processes that write their stacks when they get SIGUSR1.
    """

    started: bool = False
    step: int = 0
    first_step: int | None = None
    total_steps: int | None = None
    done: bool = False
    stopping: str = ""
    changes: int = 0
    reporters: set[int] = field(default_factory=set)
    with_stacks: set[int] = field(default_factory=set)
    _steps: dict[int, int] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        """Take an event into account."""
        match event.kind:
            case "step":
                self._step(event.rank or 0, event.fields["step"])
            case "start":
                self.started = True
                self.total_steps = event.fields.get("total_steps") or self.total_steps
                self.reporters.add(event.fields["pid"])
                if event.fields.get("stacks"):
                    self.with_stacks.add(event.fields["pid"])
            case "saved":
                self.changes += 1
            case "stopping":
                self.stopping = self.stopping or event.fields.get("cause") or "unknown"
            case "done":
                self.done = True

    def _step(self, rank: int, step: int) -> None:
        self.started = True
        if self.first_step is None:
            self.first_step = step
        if self._steps.get(rank) != step:
            self._steps[rank] = step
            self.changes += 1
            self.step = self._steps[min(self._steps)]
