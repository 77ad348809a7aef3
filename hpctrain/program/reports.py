"""Reports of a program: events that it writes into a named pipe, and the records that rank zero makes of them."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import socket
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.files import parse_json
from hpctrain.metrics.sink import OWN_FIELDS, JsonLinesSink
from hpctrain.program.processes import Process
from hpctrain.program.rank import ProgramRank
from hpctrain.run.checkpoints import saved_step
from hpctrain.run.config_change import keep_config
from hpctrain.run.ledger import StartFacts
from hpctrain.run.record_fields import COUNT, FLAG, NUMBER, PATH, TEXT, FieldType, describe_wrong_field
from hpctrain.run.saves import record_save
from hpctrain.run.times import Times
from hpctrain.terminal import visible

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
LAST_TRIES_S = 5.0
"""Seconds to try again to record saves once the program has ended."""
KEEP_CONFIG_S = 60.0
"""Seconds after which a program without a session counts as one that runs with its configuration."""

log = logging.getLogger("hpctrain.program")


@dataclass(slots=True)
class ProgramEvent:
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
    def parse(cls, line: bytes) -> ProgramEvent | None:
        """The event in a line; None if the line is malformed."""
        try:
            fields = parse_json(line)
        except ValueError:
            return None
        if not isinstance(fields, dict):
            return None
        kind = str(fields.get("event"))
        types = _FIELDS.get(kind)
        if types is None or describe_wrong_field(fields, {"rank": COUNT, **types}, _REQUIRED.get(kind, ())):
            return None
        metrics = _metrics(fields.get("metrics") or {})
        return None if metrics is None else cls(kind, fields.get("rank"), fields, metrics)


def _metrics(metrics: object) -> dict[str, float] | None:
    if not isinstance(metrics, dict):
        return None
    values = {}
    for name, value in metrics.items():
        if value in NONFINITE or (isinstance(value, float) and not math.isfinite(value)):
            values[name] = float(value)
        elif NUMBER.accepts(value):
            values[name] = value
        else:
            return None
    return values


class EventPipe:
    """The pipe of a session, which this process keeps open so that programs may come and go.

    It is a named one: subprocess and torchrun close inherited descriptors. It works for children of children, in
    containers that mount the folder, and from other languages.

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
        self.waiting: deque[ProgramEvent] = deque()
        self._partial_line = b""
        self._warned = False

    def read(self) -> bool:
        """Read all that the pipe holds; return whether it was so much that the next call should come at once."""
        try:
            data = os.read(self.descriptor, self._capacity)
        except BlockingIOError:
            return False
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        if len(self._partial_line) > LONGEST_LINE_BYTES:
            self._partial_line = b""
            self._warn(data)
        for line in lines:
            event = ProgramEvent.parse(line)
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
class ProgramProgress:
    """Progress of one rank's processes, as they have reported it so far.

    Attributes:
        started: whether a session has begun.
        step: completed steps, as the lowest rank among them reported last.
        first_step: the first reported one; None before it.
        total_steps: of the whole run, if reported.
        done: whether the program called `session.done()`: the run is complete.
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

    def add(self, event: ProgramEvent) -> None:
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


class Records:
    """Records of one attempt, on rank zero alone.

    Args:
        rank: rank zero.
        times: of the attempt.
        events: that the program reports; those that wait are looked at, and left.

    Raises:
        SupersededError: a later attempt owns the run.
        OSError: the ledger can't be written.
    """

    def __init__(self, rank: ProgramRank, times: Times, events: EventPipe) -> None:
        self._rank = rank
        self._times = times
        self._events = events
        self._saved = saved_step(rank.directory)
        self._sink: JsonLinesSink | None = None
        self._logged_step = 0
        self._started: int | None = None
        self._reporter: Process | None = None
        self._first_step: int | None = None
        self._recorded_step: int | None = None
        self._unsaved: list[tuple[int, Path]] = []
        self._warned: set[str] = set()
        self._keeps_at: float | None = time.monotonic() + KEEP_CONFIG_S
        rank.claim.require_ownership()
        place = rank.environment
        facts = StartFacts(
            restart_count=place.restart_count,
            launched=times.launched,
            code=None if rank.code is None else rank.code.digest,
        )
        rank.claim.ledger.start(
            rank.attempt,
            facts,
            job_id=place.job_id,
            nodes=place.nodes or (socket.gethostname(),),
            world_size=place.world_size,
            step=self._saved,
        )
        times.record_in(rank.claim_folder)

    def add(self, event: ProgramEvent, progress: ProgramProgress) -> None:
        """Record an event.

        Raises:
            SupersededError: a later attempt owns the run.
        """
        if self._rank.spawns and event.rank:
            return
        match event.kind:
            case "start":
                self._start(event.fields["pid"], progress)
            case "step":
                self._step(event)
            case "saved":
                self._unsaved.append((event.fields["step"], self._rank.folder / event.fields["path"]))
                self._record_saves()

    def record_waiting(self, progress: ProgramProgress) -> None:
        """Record what waits; call it about once a second.

        Raises:
            SupersededError: a later attempt owns the run.
        """
        self._record_saves()
        if self._sink is not None:
            self._sink.write()
        if self._started is None and self._keeps_at is not None and time.monotonic() >= self._keeps_at:
            self._keep_config()
        self._times.record(progress.step, force=progress.step != self._recorded_step)
        self._recorded_step = progress.step

    def completed(self) -> None:
        """Keep a resume's change to the configuration, if the completed program reported no steps."""
        if self._started is None and self._keeps_at is not None:
            self._keep_config()

    def close(self, progress: ProgramProgress) -> None:
        """Record what waits, and close the files.

        Raises:
            SupersededError: a later attempt owns the run.
        """
        deadline = time.monotonic() + LAST_TRIES_S
        self._record_saves()
        while self._unsaved and time.monotonic() < deadline:
            time.sleep(0.1)
            self._record_saves()
        if self._sink is not None:
            self._sink.close()
        self._times.record(progress.step, force=True)

    def _start(self, pid: int, progress: ProgramProgress) -> None:
        if self._started is None:
            self._times.recount("train_s", "import_s")
            self._times.enter("first_step_s")
        self._started = pid
        if progress.total_steps is not None:
            self._times.add_facts(total_steps=progress.total_steps)
            self._times.record(progress.step, force=True)

    def _step(self, event: ProgramEvent) -> None:
        step = event.fields["step"]
        if self._times.doing == "first_step_s":
            self._times.enter("train_s")
        if self._first_step is None:
            self._first_step = step
            self._times.add_facts(resumed_step=max(0, step - 1))
        if self._keeps_at is not None:
            self._keep_config()
        if self._sink is None:
            self._sink = self._open(self._first_step)
        if event.metrics:
            self._log(step, event)

    def _log(self, step: int, event: ProgramEvent) -> None:
        reporter = self._reporter_of(event)
        if step < self._logged_step and self._repeats(step, reporter):
            self._reopen(step)
        if self._sink is None:
            return
        if step < self._logged_step:
            self._warn("step", f"metrics of step {step} came after those of step {self._logged_step}: they are dropped")
            return
        self._reporter = reporter
        self._logged_step = step
        values = {name: value for name, value in event.metrics.items() if name not in OWN_FIELDS}
        for name in event.metrics.keys() - values:
            self._warn(name, f"the metric {name!r} is skipped: records have a field of this name; use another one")
        if values:
            self._sink.log(step, values)

    def _reporter_of(self, event: ProgramEvent) -> Process | None:
        """The process that reports; one that has ended already if its start isn't known."""
        pid = event.fields.get("pid", self._started)
        if pid is None or (self._reporter is not None and self._reporter.pid == pid):
            return self._reporter
        return Process.of(pid) or Process(pid, started=0)

    def _repeats(self, step: int, reporter: Process | None) -> bool:
        """Whether a process has taken the place of one that has ended, and repeats steps after the newest save.

        One that torchrun has started again does so. One that evaluates runs while the other trains, or evaluates
        what is saved.
        """
        if self._reporter is None or reporter is None or reporter.pid == self._reporter.pid or self._reporter.alive:
            return False
        # the earlier one may have ended after the later one's report, if this process reads late
        self._events.read()
        if any(event.fields.get("pid") == self._reporter.pid for event in self._events.waiting):
            return False
        return step > saved_step(self._rank.directory)

    def _reopen(self, step: int) -> None:
        if self._sink is not None:
            self._sink.close()
        self._logged_step = 0
        self._saved = saved_step(self._rank.directory)
        self._first_step = step
        self._sink = self._open(step)

    def _open(self, first_step: int) -> JsonLinesSink | None:
        # a program may report its first step long after the one that it resumed from
        before = max(0, first_step - 1)
        resumed = min(self._saved, before) if self._saved else before
        try:
            self._rank.claim.require_ownership()
            return JsonLinesSink(self._rank.directory.metrics, resumed)
        except OSError as error:
            self._warn("metrics", f"metrics can't be recorded for now: {error}")
            return None

    def _record_saves(self) -> None:
        while self._unsaved:
            step, path = self._unsaved[0]
            try:
                self._rank.claim.require_ownership()
                if self._sink is not None:
                    self._sink.flush()
                record_save(self._rank.directory, self._rank.attempt, step, path)
            except OSError as error:
                self._warn("saves", f"the save of step {step} can't be recorded for now: {error}")
                return
            del self._unsaved[0]
            if not os.path.exists(path):  # noqa: PTH110 - never raises
                advice = "report a save once it is written, with the path of its file or folder"
                self._warn("missing", f"the save of step {step} isn't there: {visible(str(path))}; {advice}")

    def _keep_config(self) -> None:
        keep_config(self._rank.directory, None if self._first_step is None else max(0, self._first_step - 1))
        self._keeps_at = None

    def _warn(self, about: str, why: str) -> None:
        if about not in self._warned:
            log.warning("%s", why)
            self._warned.add(about)
