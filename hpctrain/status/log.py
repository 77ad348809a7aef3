"""The logs of a run, read while they grow."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import BinaryIO

from hpctrain.errors import ERROR_PREFIX
from hpctrain.files import read_bytes
from hpctrain.run.directory import RunDirectory
from hpctrain.run.growing_file import CHUNK_BYTES, GrowingFile, start_of_last_lines
from hpctrain.run.job_records import JobRecords
from hpctrain.terminal import LogOutput

SETUP_ERROR = f"{ERROR_PREFIX}a line of cluster.setup failed: "
"""Beginning of a line with which the batch script names a line of cluster.setup that failed, before the job ends."""
SUPERVISED = re.compile(r"\S+ \S+ attempt \d+ on ")
"""Beginning of a line that the supervisor logs before it starts ranks."""


def batch_script_error(directory: RunDirectory, *, ran: bool) -> str:
    """Why a job ended before an attempt began, by its batch script's log, in one line; empty if it has no error.

    Args:
        directory: the run.
        ran: whether the job is known to have left the queue, so that its log should exist.
    """
    path = JobRecords(directory).batch_log
    if path is None:
        return ""
    try:
        lines = read_bytes(path, last_bytes=CHUNK_BYTES).decode(errors="replace").splitlines()
    except FileNotFoundError:
        if not ran:
            return ""
        return f"it wrote no log: if its node can't see {path.parent}, put that on a file system that all nodes share"
    except OSError:
        return ""
    return next((line.removeprefix(ERROR_PREFIX) for line in reversed(lines) if line.startswith(ERROR_PREFIX)), "")


def ended_in_setup(directory: RunDirectory) -> bool:
    """Whether the newest job's last start ended at a line of cluster.setup, by its batch script's log."""
    path = JobRecords(directory).batch_log
    if path is None:
        return False
    try:
        lines = read_bytes(path, last_bytes=CHUNK_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return False
    # the log of a requeued job holds what its earlier starts printed
    last = next((line for line in reversed(lines) if line.startswith(SETUP_ERROR) or SUPERVISED.match(line)), "")
    return last.startswith(SETUP_ERROR)


class RunLog:
    """Copies a rank's output over all attempts; until the rank prints something, copies the batch script's log.

    Args:
        directory: the run.
        rank: None means rank zero, or the batch script if rank zero has no log.
        output: the stream to copy to.
        last_lines: begin with only this many of the existing lines; None copies all.
        skip_bytes: number of bytes to leave out at the beginning.
    """

    def __init__(
        self,
        directory: RunDirectory,
        rank: int | None,
        output: BinaryIO | LogOutput,
        *,
        last_lines: int | None = None,
        skip_bytes: int = 0,
    ) -> None:
        self.directory = directory
        self.rank = rank
        self._output = output
        self._last_lines = last_lines
        self._skip_bytes = skip_bytes
        self._file: GrowingFile | None = None

    def copy(self) -> bool:
        """Copy the lines that are new; return whether a log exists."""
        path = self._path()
        if path is not None and (self._file is None or self._file.path != path):
            if self._file is not None:
                # the batch script may have printed more before the first rank did
                self._copy_rest(self._file)
            elif path != self._rank_log:
                notice = f"no rank has printed anything yet; this is the batch script's log, {path}"
                print(f"hpctrain: {notice}", file=sys.stderr, flush=True)
            start = self._skip_bytes if self._last_lines is None else start_of_last_lines(path, self._last_lines)
            self._file = GrowingFile(path, start)
            # the log that comes after the batch script's is new: all of it is copied
            self._last_lines = None
        if self._file is not None:
            self._copy_rest(self._file)
        return self._file is not None

    def end(self) -> None:
        """Reset the colours of the terminal, which the log may have changed."""
        if isinstance(self._output, LogOutput):
            self._output.reset()

    def ranks(self) -> list[int]:
        """The ranks that have a log."""
        return self.directory.ranks_with(self.directory.rank_log("*"))

    @property
    def shows_rank(self) -> bool:
        """Whether the rank's own output was copied, and not only the batch script's."""
        return self._file is not None and self._file.path == self._rank_log

    @property
    def _rank_log(self) -> Path:
        return self.directory.rank_log(self.rank or 0)

    def _path(self) -> Path | None:
        paths = [self._rank_log]
        if self.rank is None:
            jobs = reversed(JobRecords(self.directory).read())
            paths += [Path(str(record["log"])) for record in jobs if record.get("log")]
        # srun creates the ranks' logs long before anything is in them
        return next((path for path in paths if path.exists() and path.stat().st_size), None)

    def _copy_rest(self, file: GrowingFile) -> None:
        while data := file.read().data:
            self._output.write(data)
        self._output.flush()
