"""The process that launched an attempt on its own machine."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import RunDirectoryError
from hpctrain.files import read_json, write_json
from hpctrain.run.process import stat_fields

FILE_NAME = "owner.json"
CLOCK_SLACK_S = 5.0
"""A file server's clock may differ from ours by so much."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Host and process id of a local launch, kept in the attempt's claim as ``owner.json``.

    Attributes:
        host: the machine's name.
        pid: the launching process; a signal to it is a signal to the run.
        written: when the record was made, in epoch seconds; a process that began later is another one.
    """

    host: str
    pid: int
    written: float

    @classmethod
    def read(cls, claim: Path) -> Owner | None:
        """The owner of an attempt; None where it wasn't launched locally, or the record can't be read."""
        path = claim / FILE_NAME
        try:
            record = read_json(path)
            return cls(str(record["host"]), int(record["pid"]), path.stat().st_mtime)
        except (OSError, RunDirectoryError, KeyError, TypeError, ValueError):
            return None

    @staticmethod
    def write(claim: Path) -> None:
        """Record this process as the owner of an attempt."""
        write_json(claim / FILE_NAME, {"host": socket.gethostname(), "pid": os.getpid()}, durable=False)

    @property
    def is_here(self) -> bool:
        """Whether it belongs to this machine."""
        return self.host == socket.gethostname()

    @property
    def alive(self) -> bool | None:
        """Whether the process still runs; None where that can't be seen, from another machine."""
        if not self.is_here:
            return None
        began = _began(self.pid)
        return began is not None and began <= self.written + CLOCK_SLACK_S

    @property
    def command(self) -> str:
        """What the process runs, as typed; empty where it is gone or belongs to somebody else."""
        try:
            return Path(f"/proc/{self.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            return ""


def _began(pid: int) -> float | None:
    """Epoch seconds at which a process began, from proc(5); None where there is none, or only its zombie."""
    try:
        fields = stat_fields(pid)
        boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
    except (OSError, StopIteration):
        return None
    if fields[0] in "ZX":
        return None
    return int(boot.split()[1]) + int(fields[19]) / os.sysconf("SC_CLK_TCK")
