"""The launcher of an attempt: what it passes to its ranks through their environment, and which process it is."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from hpctrain.errors import RunDirectoryError
from hpctrain.files import read_json, write_json
from hpctrain.run.file_system import write_with_reserve
from hpctrain.run.process import command_line, process_start
from hpctrain.run.record_fields import FLAG, NAME, TIME, WHOLE, FieldType, decode

PREFIX = "HPCTRAIN_"
FILE_NAME = "owner.json"
_PID = FieldType("a process id", lambda value: WHOLE.accepts(value) and 0 < value < 2**31)
CLOCK_SLACK_S = 5.0
"""Seconds by which the clocks of a file server and of this machine may differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherFacts:
    """The data that a rank receives from its launcher; empty for a rank started by hand, with srun or torchrun.

    Attributes:
        attempt: claimed by the launcher, which also records its end; None if rank zero has to do both.
        logged: whether standard output already goes into the rank's log in the run directory.
        store: the file by which ranks on one machine meet, in a folder that only their user may enter; empty without.
        parent: the process id of a launcher on the same machine, whose ranks must not outlive it.
        terminal: the file descriptor of the launcher's terminal, which rank zero inherits; None without one.
        code: digest of the copy of the code from which the rank imports; empty if there is none.
        version: of the launcher's hpctrain, which the rank's has to be; empty if both are the same installation.
    """

    attempt: int | None = None
    logged: bool = False
    store: str = ""
    parent: int | None = None
    terminal: int | None = None
    code: str = ""
    version: str = ""

    @classmethod
    def read(cls, variables: Mapping[str, str]) -> LauncherFacts:
        """Read the variables that the launcher set, if there was one."""
        attempt, parent, terminal = (variables.get(f"{PREFIX}{name}") for name in ("CLAIM", "PARENT", "TERMINAL"))
        return cls(
            attempt=int(attempt) if attempt else None,
            logged=variables.get(f"{PREFIX}LOGGED") == "1",
            store=variables.get(f"{PREFIX}STORE", ""),
            parent=int(parent) if parent else None,
            terminal=int(terminal) if terminal else None,
            code=variables.get(f"{PREFIX}CODE", ""),
            version=variables.get(f"{PREFIX}VERSION", ""),
        )

    def variables(self) -> dict[str, str]:
        """The environment variables that pass this to a rank."""
        # not ATTEMPT: programs get that one, and ranks of hpctrain that a program starts belong to another run
        values = {"CLAIM": self.attempt, "LOGGED": int(self.logged), "STORE": self.store, "PARENT": self.parent}
        values |= {"TERMINAL": self.terminal, "CODE": self.code, "VERSION": self.version}
        return {f"{PREFIX}{name}": str(value) for name, value in values.items() if value}


@dataclass(frozen=True, slots=True)
class Owner:
    """Host and process id of a local launch, kept in the attempt's claim as ``owner.json``.

    It shows that a process which was killed is gone; the next attempt then records the end. A second process that waits
    for the first would only record it, and notify, earlier.

    Attributes:
        host: the machine's name.
        pid: the launching process; a signal to it is a signal to the run.
        written: when the record was written, in epoch seconds.
        in_program: whether it is a user's program or notebook, which outlives the run, and gets no signal by `cancel`.
    """

    host: Annotated[str, NAME]
    pid: Annotated[int, _PID]
    written: Annotated[float, TIME]
    in_program: Annotated[bool, FLAG] = False

    @classmethod
    def read(cls, claim: Path) -> Owner | None:
        """The owner of an attempt; None if it wasn't launched locally or the record can't be read."""
        path = claim / FILE_NAME
        try:
            return decode(cls, {**read_json(path), "written": path.stat().st_mtime})
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
