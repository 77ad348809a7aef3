"""The life of a rank's process: signals first, then the rank's work, then its exit record.

Why it is like this: docs/adr/0037-one-room-for-each-thing.md.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from typing import NoReturn, Protocol, TextIO

from hpctrain.attempt.rank_python import other_version
from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.cluster.variables import Variables
from hpctrain.config.root import RunConfig
from hpctrain.errors import ERROR_PREFIX, ClusterEnvironmentError, ExitCode, HpctrainError, RunDirectoryError
from hpctrain.phrases import DATE_TIME
from hpctrain.run.directory import RunDirectory, umask_of
from hpctrain.run.exit_record import ExitRecord, read_exit_records
from hpctrain.run.file_system import explain
from hpctrain.run.launcher import LauncherFacts
from hpctrain.run.process import end_with_parent
from hpctrain.run.reason import Reason
from hpctrain.run.start_record import StartRecord
from hpctrain.streams import LogHandler, flush_output, ignore_write_errors, open_streams
from hpctrain.terminal import VisibleFormatter, can_redraw, visible


class Workload(Protocol):
    """Work of a rank's process: a training, or a program of the user's."""

    @property
    def config(self) -> RunConfig:
        """Of the run."""

    @property
    def directory(self) -> RunDirectory | None:
        """The run directory; None if it doesn't exist yet."""

    def prepared(self) -> AbstractContextManager[object]:
        """Return the context of the attempt, in which this process handles the stop signals."""

    def run(self, environment: ClusterEnvironment, launcher: LauncherFacts) -> int:
        """Run one attempt as the rank of this place, and write its exit record, also after an error.

        Returns:
            An `ExitCode`.
        """


def run_rank(workload: Workload) -> int:
    """Run one attempt as this rank.

    Returns:
        An `ExitCode`.

    Raises:
        ClusterEnvironmentError: this process's place among the ranks can't be derived.
    """
    config = workload.config
    umask = os.umask(umask_of(config.mode))
    try:
        with workload.prepared():
            launcher = LauncherFacts.read(os.environ)
            end_with_parent(launcher.parent)
            environment = ClusterEnvironment.from_environment(os.environ, master_port=config.cluster.master_port)
            if workload.directory is not None and launcher.attempt is not None:
                StartRecord.of_this_process(environment).write(workload.directory.attempt(launcher.attempt))
            return workload.run(environment, launcher)
    finally:
        os.umask(umask)


def main(workload: Callable[[RunDirectory], Workload]) -> NoReturn:
    """Entry point of a rank's process; stop signals are blocked when it starts.

    Args:
        workload: makes it for the run directory.
    """
    open_streams()
    ignore_write_errors()
    directory = None
    code: int = ExitCode.FAILED
    reason, problem = Reason.FAILED, ""
    try:
        if not sys.argv[1:]:
            raise RunDirectoryError("expected a run directory, found no argument; `python -m hpctrain` launches ranks")
        directory = RunDirectory.existing(sys.argv[1])
        # before the configuration is read, of which another version may have other keys
        problem = other_version(LauncherFacts.read(os.environ).version)
        if not problem:
            code = run_rank(workload(directory))
    except HpctrainError as error:
        problem = str(error)
        if isinstance(error.__cause__, OSError):  # of a file that may be readable in the next attempt
            reason = Reason.INFRASTRUCTURE
    except OSError as error:
        reason = Reason.INFRASTRUCTURE
        # at its start, or while it records its end
        problem = f"the rank's process failed: {explain(error)}"
    if problem:
        print(f"{ERROR_PREFIX}{visible(problem)}", file=sys.stderr)  # noqa: T201 - no log yet
        if directory is not None:
            record_early_end(directory, reason, problem, os.environ)
    end_process(code)


def record_early_end(directory: RunDirectory, reason: Reason, message: str, environ: Mapping[str, str]) -> None:
    """Leave an exit record of a rank that can't start, such as for a full disk of its node, if that is possible.

    Args:
        directory: of the run.
        reason: why it can't.
        message: the same in one line.
        environ: of the rank; without an attempt in it, nothing is written.
    """
    with suppress(OSError, HpctrainError):
        launcher = LauncherFacts.read(environ)
        if launcher.attempt is not None:
            rank = _rank(environ)
            if rank is None or rank in read_exit_records(directory.attempt(launcher.attempt)):
                return  # it is unknown, or its work had ended already
            host = socket.gethostname()
            record = ExitRecord(rank=rank, host=host, reason=reason, step=0, message=message, time=time.time())
            record.write(directory.attempt(launcher.attempt))


def _rank(environ: Mapping[str, str]) -> int | None:
    try:
        return ClusterEnvironment.from_environment(environ).rank
    except ClusterEnvironmentError:  # which may be why it can't start
        launched = Variables(environ)
        rank = launched.number("SLURM_PROCID")
        return launched.number("RANK") if rank is None else rank


def end_process(code: int) -> NoReturn:
    """End this process at once, even if threads of a broken process group or a writer would keep it alive."""
    flush_output()
    os._exit(code)


def log_to(stream: TextIO, text: str, level: int = logging.INFO) -> None:
    """Log what hpctrain reports to a stream, and nowhere else.

    Args:
        stream: standard output or standard error.
        text: the format of a line, for `logging.Formatter`.
        level: the lowest that is logged.
    """
    logger = logging.getLogger("hpctrain")
    logger.handlers.clear()
    logger.propagate = False
    logger.setLevel(level)
    handler = LogHandler(stream)
    # over the ^C that the terminal echoes
    clear = "\r\x1b[K" if can_redraw(stream) else ""
    handler.setFormatter(VisibleFormatter(text, DATE_TIME, prefix=clear, stream=stream))
    logger.addHandler(handler)
