"""The process that launched an attempt on its own machine."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import RunDirectoryError
from hpctrain.files import read_json, write_json
from hpctrain.run.disk_reserve import write_with_reserve
from hpctrain.run.process import command_line, process_start
from hpctrain.run.record_fields import NAME, WHOLE, FieldType, require_fields

FILE_NAME = "owner.json"
_FIELD_TYPES = {
    "host": NAME,
    "pid": FieldType("a process id", lambda value: WHOLE.accepts(value) and 0 < value < 2**31),
}
CLOCK_SLACK_S = 5.0
"""Seconds by which the clocks of a file server and of this machine may differ."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Host and process id of a local launch, kept in the attempt's claim as ``owner.json``.

    Attributes:
        host: the machine's name.
        pid: the launching process; a signal to it is a signal to the run.
        written: when the record was written, in epoch seconds.
        in_program: whether it is a user's program or notebook, which outlives the run, and gets no signal by `cancel`.
    """

    host: str
    pid: int
    written: float
    in_program: bool = False

    @classmethod
    def read(cls, claim: Path) -> Owner | None:
        """The owner of an attempt; None if it wasn't launched locally or the record can't be read."""
        path = claim / FILE_NAME
        try:
            record = read_json(path)
            require_fields(path, record, _FIELD_TYPES, required=("host", "pid"))
            return cls(record["host"], record["pid"], path.stat().st_mtime, record.get("in_program") is True)
        except (OSError, RunDirectoryError):
            return None

    @staticmethod
    def write(claim: Path, *, in_program: bool = False) -> None:
        """Record this process as the owner of an attempt; `in_program` if it is a user's program."""
        record: dict[str, object] = {"host": socket.gethostname(), "pid": os.getpid()}
        if in_program:
            record["in_program"] = True
        write_with_reserve(claim, lambda: write_json(claim / FILE_NAME, record, durable=False))

    @property
    def is_here(self) -> bool:
        """Whether the process runs on this machine."""
        return self.host == socket.gethostname()

    @property
    def alive(self) -> bool | None:
        """Whether the process still runs; None if it runs on another machine."""
        if not self.is_here:
            return None
        start = process_start(self.pid)
        # a process that started after the record was written is a different one with the same id
        return start is not None and start <= self.written + CLOCK_SLACK_S

    @property
    def command(self) -> str:
        """The command line of the process; empty if it has ended or is hidden."""
        return command_line(self.pid)
