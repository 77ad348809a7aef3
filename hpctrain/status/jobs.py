"""The jobs of runs: which they are, what SLURM answers about them, and how the log of the newest one ends."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.errors import ERROR_PREFIX, RunDirectoryError, SchedulerError, SchedulerMissingError
from hpctrain.files import read_bytes
from hpctrain.run.directory import RunDirectory
from hpctrain.run.growing_file import CHUNK_BYTES
from hpctrain.run.job_records import JobRecords, cancelled_at
from hpctrain.run.ledger import Attempt, Ledger
from hpctrain.scheduler.job import SlurmJob
from hpctrain.scheduler.slurm import JOB_ID, Slurm
from hpctrain.streams import Printer, print_warning

Jobs = Mapping[str, SlurmJob | None]
"""SLURM's records by job id; None for a job that SLURM doesn't know, or no longer remembers."""
Ask = Callable[[Sequence[str], Printer], Jobs | None]
"""The type of `query_jobs`."""
ASK_EVERY_S = 10.0
"""Seconds between two queries for all runs together: many users may watch their runs at the same time."""
SETUP_ERROR = f"{ERROR_PREFIX}a line of cluster.setup failed: "
"""Beginning of a line with which the batch script names a line of cluster.setup that failed, before the job ends."""
SUPERVISED = re.compile(r"\S+ \S+ attempt \d+ on ")
"""Beginning of a line that the supervisor logs before it starts ranks."""


@dataclass(frozen=True, slots=True)
class RunRecords:
    """The ledger of a run and the records of its jobs, as they were when they were read.

    Attributes:
        directory: of the run.
        submissions: the submissions and cancellations, and which jobs began to work for it or left it, oldest first.
        attempts: oldest first.
    """

    directory: RunDirectory
    submissions: Sequence[Mapping[str, Any]]
    attempts: Sequence[Attempt]

    @classmethod
    def read(cls, directory: RunDirectory) -> RunRecords:
        """Read the records.

        Raises:
            OSError: a file exists and can't be read.
            RunDirectoryError: a record has a field that can't be.
        """
        return cls(directory, JobRecords(directory).read(), Ledger(directory).attempts())

    def again(self) -> RunRecords:
        """Return the records as they are now; read only if an attempt may have begun or ended since.

        Raises:
            OSError: as `read`.
            RunDirectoryError: as `read`.
        """
        # not by the time of the last change: over NFS, that of a file that isn't opened may be old
        return self if self.attempts and not self.attempts[-1].open else RunRecords.read(self.directory)

    @property
    def job_ids(self) -> tuple[str, ...]:
        """The jobs of the run, from its submissions and its attempts, oldest first."""
        submitted = [record.get("job_id") for record in self.submissions]
        started = [attempt.job_id for attempt in self.attempts]
        # one id that isn't SLURM's would spoil the query about the jobs of all runs
        ids = list(dict.fromkeys(job_id for job_id in [*submitted, *started] if job_id and JOB_ID.fullmatch(job_id)))
        # the id of a whole array covers the other runs as well
        arrays = {job_id.partition("_")[0] for job_id in ids if "_" in job_id}
        return tuple(job_id for job_id in ids if job_id not in arrays)

    @property
    def left_jobs(self) -> frozenset[str]:
        """The jobs that have stopped working for the run: they train other runs, or are over."""
        last = {str(record["job_id"]): record for record in self.submissions if record.get("job_id")}
        return frozenset(job_id for job_id, record in last.items() if record.get("left") or self._has_left(record))

    def _has_left(self, began: Mapping[str, Any]) -> bool:
        """Whether the run has ended for good in a job that trains others as well, and the job died before it left."""
        newest = self.attempts[-1] if self.attempts else None
        if newest is None or newest.reason is None or newest.job_id != began["job_id"] or not began.get("began"):
            return False
        return not newest.reason.meaning.requeued and (newest.end_time or 0.0) >= began["time"]

    @property
    def present_job_ids(self) -> tuple[str, ...]:
        """The jobs that may still work for the run, oldest first."""
        left_jobs = self.left_jobs
        return tuple(job_id for job_id in self.job_ids if job_id not in left_jobs)

    @property
    def cancelled_at(self) -> float | None:
        """When the user cancelled the run, in epoch seconds; None if they didn't, or a job was submitted afterwards."""
        return cancelled_at(self.submissions)

    @property
    def submission(self) -> tuple[str, float] | None:
        """Job id and time of the newest submission, in epoch seconds; None without one, or if the job has left."""
        records = [record for record in self.submissions if record.get("job_id") and not record.get("waited")]
        if not records or str(records[-1]["job_id"]) in self.left_jobs:
            return None
        return str(records[-1]["job_id"]), float(records[-1]["time"])


def readable_records(directory: RunDirectory) -> RunRecords | None:
    """Read the records of a run; None if they can't be read, which is the state `unreadable`."""
    with contextlib.suppress(OSError, RunDirectoryError):
        return RunRecords.read(directory)
    return None


def present_jobs(run_records: Sequence[RunRecords | None]) -> list[str]:
    """The jobs that may still work for any of several runs."""
    return [job_id for records in run_records if records is not None for job_id in records.present_job_ids]


def query_jobs(job_ids: Sequence[str], warn: Printer = print_warning) -> Jobs | None:
    """Query SLURM for jobs, all with one command; None if SLURM can't be reached from here.

    Args:
        job_ids: of the jobs.
        warn: gets a line if SLURM is there and doesn't answer.
    """
    if not job_ids:
        return {}
    try:
        return Slurm().find(job_ids)
    except SchedulerMissingError:
        # a machine without SLURM that sees the run directories: usual, and not worth a warning
        return None
    except SchedulerError as error:
        warn(str(error))
        return None


def job_ids(directory: RunDirectory) -> list[str]:
    """The jobs that may still work for a run, oldest first."""
    return list(RunRecords.read(directory).present_job_ids)


class JobQuery:
    """SLURM's last answer, for as long as it may be used.

    A controller that falls silent leaves its last answer: it is usually back within minutes.

    Args:
        clock: monotonic seconds.
        ask: as `query_jobs`.

    Attributes:
        answers: by job id; None if SLURM can't be reached from here.
        asked_at: when it was asked last, on the clock; None before.
        answered_at: when it answered last.
        silent: whether it didn't answer the last query that is over.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, ask: Ask = query_jobs) -> None:
        self.answers: Jobs | None = {}
        self.asked_at: float | None = None
        self.answered_at: float | None = None
        self.silent = False
        self._clock = clock
        self._ask = ask

    @property
    def is_due(self) -> bool:
        """Whether SLURM may be asked again."""
        return self.asked_at is None or self._clock() - self.asked_at >= ASK_EVERY_S

    def ask(self, job_ids: Sequence[str], warn: Printer) -> Jobs | None:
        """Ask about these jobs if that is due, and return all answers so far, as `query_jobs`."""
        if job_ids and self.is_due:
            self.asked_at = self._clock()
            answer = self._ask(job_ids, warn)
            self.silent = answer is None
            if answer is not None:
                self.answers = {**(self.answers or {}), **answer}
                self.answered_at = self._clock()
            elif self.answered_at is None:
                self.answers = None
        return self.answers


def batch_script_error(directory: RunDirectory, *, ran: bool) -> str:
    """Return the error in the log of a job that ended before an attempt began, in one line; empty if it has none.

    Args:
        directory: the run.
        ran: whether the job is known to have left the queue, so that its log should exist.
    """
    path = JobRecords(directory).batch_log
    if path is None:
        return ""
    try:
        lines = _newest_lines(path)
    except FileNotFoundError:
        if not ran:
            return ""
        return f"it wrote no log: if its node can't see {path.parent}, put that on a file system that all nodes share"
    except OSError:
        return ""
    return next((line.removeprefix(ERROR_PREFIX) for line in lines if line.startswith(ERROR_PREFIX)), "")


def ended_in_setup(directory: RunDirectory) -> bool:
    """Whether the newest job's last start ended at a line of cluster.setup, by its batch script's log."""
    path = JobRecords(directory).batch_log
    try:
        lines = [] if path is None else _newest_lines(path)
    except OSError:
        return False
    # the log of a requeued job holds what its earlier starts printed
    last = next((line for line in lines if line.startswith(SETUP_ERROR) or SUPERVISED.match(line)), "")
    return last.startswith(SETUP_ERROR)


def _newest_lines(path: Path) -> list[str]:
    """The last lines of a batch script's log, newest first."""
    return read_bytes(path, last_bytes=CHUNK_BYTES).decode(errors="replace").splitlines()[::-1]
