"""Follow a run to its end: its log as it grows, the changes of its state, and its exit code."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import BinaryIO, TextIO

from hpctrain.attempt.outcome import describe, resume_advice
from hpctrain.errors import ExitCode
from hpctrain.phrases import listed
from hpctrain.run.directory import RunDirectory
from hpctrain.run.exit_record import first_cause, read_exit_records
from hpctrain.run.growing_file import GrowingFile, start_of_last_lines
from hpctrain.run.job_records import JobRecords
from hpctrain.run.reason import Reason
from hpctrain.status.jobs import ASK_EVERY_S, Jobs, job_ids, query_jobs
from hpctrain.status.run_status import RunStatus, read_status
from hpctrain.status.state import RunState
from hpctrain.streams import Printer, print_warning
from hpctrain.terminal import LogOutput, log_output

LOOK_EVERY_S = 0.2
"""Seconds between two reads of the log and the run directory."""
ASK_SOON_S = 1.0
"""Seconds between two queries while the run is about to end, and for a command that waits for the job itself."""
SETTLE_S = 1.0
"""Seconds for which a run must appear to be over: between two attempts it may appear so for a moment."""
LATE_RECORD_S = 15.0
"""Seconds that a record of the next attempt, or of the end, may take to cross a shared file system."""


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
        path = log_to_show(self.directory, self.rank)
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

    @property
    def shows_rank(self) -> bool:
        """Whether the rank's own output was copied, and not only the batch script's."""
        return self._file is not None and self._file.path == self._rank_log

    @property
    def _rank_log(self) -> Path:
        return self.directory.rank_log(self.rank or 0)

    def _copy_rest(self, file: GrowingFile) -> None:
        while data := file.read().data:
            self._output.write(data)
        self._output.flush()


def log_to_show(directory: RunDirectory, rank: int | None) -> Path | None:
    """The log of a rank; with None that of rank zero, or before it has printed anything that of the batch script."""
    paths = [directory.rank_log(rank or 0)]
    if rank is None:
        jobs = reversed(JobRecords(directory).read())
        paths += [Path(str(record["log"])) for record in jobs if record.get("log")]
    # srun creates the ranks' logs long before anything is in them
    return next((path for path in paths if path.exists() and path.stat().st_size), None)


class RunWatch:
    """Looks at a run until it is over.

    Args:
        directory: of the run.
        until_job_ends: the run is over once SLURM's job is as well, which may be seconds after the run's end.
        warn: gets a line if SLURM is there and doesn't answer.
    """

    def __init__(self, directory: RunDirectory, *, until_job_ends: bool = False, warn: Printer = print_warning) -> None:
        self._directory = directory
        self._until_job_ends = until_job_ends
        self._warn = warn
        self._ask_at = 0.0
        self._job_ids: list[str] = []
        self._jobs: Jobs | None = {}
        self._over_since: float | None = None

    @property
    def may_be_over(self) -> bool:
        """Whether the run appeared to be over at the last `read_status`; `is_over` says so once it is certain."""
        return self._over_since is not None

    def read_status(self) -> RunStatus:
        """Read the run's status."""
        ids = job_ids(self._directory)
        # query SLURM at once about a job that was submitted to continue the run
        if ids != self._job_ids or time.monotonic() >= self._ask_at:
            self._jobs = query_jobs(ids, self._warn)
            self._job_ids = ids
            soon = self._until_job_ends or self._over_since is not None
            self._ask_at = time.monotonic() + (ASK_SOON_S if soon and self._jobs is not None else ASK_EVERY_S)
        return read_status(self._directory, self._jobs)

    def is_over(self, status: RunStatus) -> bool:
        """Return whether the run is over, as the statuses so far show; call it after each `read_status`."""
        # a run whose state can't be determined here may continue; and a script that waits for a job needs it to be over
        unseen = self._jobs is None and (self._until_job_ends or status.state is RunState.INTERRUPTED)
        continues = status.state.may_change or status.state in (RunState.PREPARED, RunState.UNKNOWN)
        if continues or unseen or (self._until_job_ends and self._holds_nodes()):
            self._over_since = None
            return False
        if self._over_since is None:
            # SLURM's last answer may be older than the record of the end
            self._over_since = time.monotonic()
            self._ask_at = 0.0
        settle_s = LATE_RECORD_S if self._expects_record(status) else SETTLE_S
        return time.monotonic() - self._over_since >= settle_s

    def _holds_nodes(self) -> bool:
        return any(record is not None and record.state.is_running for record in (self._jobs or {}).values())

    def _expects_record(self, status: RunStatus) -> bool:
        """Whether the job is over and its end isn't recorded yet: the record may be on its way from another node."""
        has_job = bool(self._job_ids and status.attempts) and status.state is not RunState.CANCELLED
        return has_job and status.attempts[-1].may_continue


class Follower:
    """Copies a run's log as it grows, and reports the changes of its state, until the run is over.

    Args:
        log: the log to copy.
        messages: where the changes are reported.
        until_job_ends: follow until SLURM's job is over as well, which may be seconds after the run's end.
    """

    def __init__(self, log: RunLog, messages: TextIO, *, until_job_ends: bool = False) -> None:
        self._log = log
        self._messages = messages
        self._until_job_ends = until_job_ends
        self._watch = RunWatch(log.directory, until_job_ends=until_job_ends)
        self._reported = ""

    def follow(self) -> RunStatus:
        """Follow the run; return its status at the end."""
        while True:
            has_log = self._log.copy()
            status = self._watch.read_status()
            if self._watch.is_over(status):
                self._log.copy()
                return status
            if not self._watch.may_be_over:
                self._report_change(status, quiet=has_log and not self._until_job_ends)
            time.sleep(LOOK_EVERY_S)

    def print_message(self, text: str) -> None:
        """Print a message from hpctrain, which isn't part of the log."""
        print(f"hpctrain: {text}", file=self._messages, flush=True)

    def _report_change(self, status: RunStatus, *, quiet: bool) -> None:
        """Report the state if it changed; ``quiet``: only if it waits, since the log shows the rest."""
        nodes = status.attempts[-1].nodes if status.attempts else ()
        where = f" on {listed(nodes, separator=' ')}" if nodes and status.state is RunState.RUNNING else ""
        # why it is over is printed at the end
        over = self._until_job_ends and bool(status.attempts) and status.attempts[-1].reason is not None
        text = f"the run is {status.state if over else status.described}{where}"
        if text == self._reported:
            return
        if not quiet or status.state in (RunState.QUEUED, RunState.HELD):
            self.print_message(text)
        self._reported = text


def wait_for(directory: RunDirectory, *, skip_bytes: int = 0) -> ExitCode:
    """Follow a submitted run on standard output.

    Args:
        directory: the run.
        skip_bytes: bytes at the beginning of rank zero's log, from earlier attempts, to leave out.

    Returns:
        The run's exit code.
    """
    # the log is copied to the binary buffer, past any text that is still held back
    sys.stdout.flush()
    log = RunLog(directory, 0, log_output(sys.stdout), skip_bytes=skip_bytes)
    follower = Follower(log, sys.stdout, until_job_ends=True)
    try:
        status = follower.follow()
    finally:
        log.end()
    last = status.attempts[-1] if status.attempts and not status.unstarted else None
    if last is not None and last.reason is not None:
        at_step = f" at step {last.end_step}" if status.knows_step else ""
        follower.print_message(f"{last.reason}{at_step}; run directory {directory.path}")
        code = last.reason.meaning.exit_code
        if code is not ExitCode.FINISHED:
            cause = first_cause(read_exit_records(directory.attempt(last.attempt)))
            if cause is None or cause.blames_peer:
                follower.print_message(last.detail)
            elif cause.rank or not log.shows_rank:  # rank zero's error is in its log, which was printed above
                follower.print_message(describe(cause, independent=bool(status.command)))
            follower.print_message(resume_advice(directory, last.reason))
        return code
    if status.state is RunState.CANCELLED:
        follower.print_message(f"the run was cancelled; {resume_advice(directory, Reason.CANCELLED)}")
        return ExitCode.CANCELLED
    log_path = JobRecords(directory).batch_log
    see = f"; see {log_path}" if log_path is not None and log_path.exists() else ""
    follower.print_message(f"the run is {status.described}{see}")
    return ExitCode.FAILED
