"""The runs under a folder, watched together: the status of each, and the curves of its metrics."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hpctrain.files import describe_os_error
from hpctrain.run.directory import RunDirectory
from hpctrain.run.evaluation import FILE_NAME as EVALUATION
from hpctrain.scheduler.job import SlurmJob
from hpctrain.status.jobs import Ask, JobQuery, Jobs, query_jobs
from hpctrain.status.run_status import RunStatus, status_of
from hpctrain.status.runs import find_runs
from hpctrain.status.state import RunState
from hpctrain.streams import Printer
from hpctrain.top.curve import FileStamp, MetricCurves, file_stamp

FIRST_BYTES = 32 * 2**10
"""Bytes at the end of metrics.jsonl that are read first."""
READ_EVERY_S = 10.0
"""Seconds between two reads of the records of a run that may change; they are read at once if their files change."""
READ_LOCAL_EVERY_S = 3.0
"""As above, for a run of this machine, whose process may be gone without a change of a file."""
READ_SETTLED_EVERY_S = 60.0
"""As above, for a run that is over."""
FIND_EVERY_S = 10.0
"""Seconds between two searches for runs that have appeared."""


class WatchedRun:
    """A run, looked at again and again.

    Args:
        directory: of the run.
        name: shown for it.
        clock: monotonic seconds.

    Attributes:
        status: at the last update; without the details that `read_status` can leave out.
        curves: of its metrics.
        gone: whether the run directory has vanished.
    """

    def __init__(self, directory: RunDirectory, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.directory = directory
        self.name = name
        self.status = RunStatus(name=name, path=directory.path, state=RunState.UNKNOWN, note="not read yet")
        self.curves = MetricCurves(directory.metrics, FIRST_BYTES)
        self.gone = False
        self._clock = clock
        path = str(directory.path)
        self._config = f"{path}/{directory.config.name}"
        self._watched = [f"{path}/{file.name}" for file in (directory.attempts, directory.jobs, directory.claims)]
        self._stamps: list[FileStamp] = []
        self._evaluation = ""
        self._records: dict[str, SlurmJob | None] | None = {}
        self._read_at = float("-inf")

    def update(self, jobs: Jobs | None) -> None:
        """Read what is new.

        Args:
            jobs: SLURM's records of the jobs that it was asked about.
        """
        try:
            self._update(jobs)
        except FileNotFoundError:
            self.gone = True
        except OSError as error:
            note = describe_os_error(error)
            self.status = replace(self.status, state=RunState.UNREADABLE, note=note)
            self._read_at = float("-inf")

    def lengthen_curves(self, num_bytes: int) -> None:
        """Have the curves begin so many bytes before the end of metrics.jsonl, if they begin later."""
        if self.curves.last_bytes < num_bytes:
            curves = MetricCurves(self.directory.metrics, num_bytes)
            if curves.read() or not self.curves.by_name:
                self.curves = curves  # complete: another thread may draw them

    @property
    def settled(self) -> bool:
        """Whether SLURM need not be asked about its jobs again."""
        records = self._records or {}
        over = all(record is None or record.state.is_finished for record in records.values())
        return over and records.keys() >= set(self.status.job_ids) and not self.status.state.may_change

    def _update(self, jobs: Jobs | None) -> None:
        config = file_stamp(self._config)
        if config is None:
            raise FileNotFoundError
        evaluation = file_stamp(self._evaluation) if self._evaluation else None
        stamps = [config, *map(file_stamp, self._watched), evaluation]
        is_due = self._clock() - self._read_at >= self._every_s()
        is_due = is_due or stamps != self._stamps or self._records_of(jobs) != self._records
        grew = self.curves.read(if_changed=not is_due)
        if is_due:
            self._read(jobs)
            self._stamps = stamps
        elif grew:
            self._show_metrics()

    def _every_s(self) -> float:
        if not self.status.state.may_change:
            return READ_SETTLED_EVERY_S
        return READ_EVERY_S if self.status.job_ids else READ_LOCAL_EVERY_S

    def _records_of(self, jobs: Jobs | None) -> dict[str, SlurmJob | None] | None:
        return None if jobs is None else {job_id: jobs[job_id] for job_id in self.status.job_ids if job_id in jobs}

    def _read(self, jobs: Jobs | None) -> None:
        self.status = status_of(self.directory, jobs, brief=True, logged=self.curves.last)
        self._records = self._records_of(jobs)
        self._read_at = self._clock()
        attempts = self.status.attempts
        self._evaluation = str(self.directory.attempt(attempts[-1].attempt) / EVALUATION) if attempts else ""

    def _show_metrics(self) -> None:
        status, logged = self.status, self.curves.last
        last = status.attempts[-1] if status.attempts else None
        step = status.step if last is None or not last.open else max(status.step, logged.step)
        values = {**status.metrics, **logged.values}
        self.status = replace(status, step=step, metrics=values, metrics_time=logged.time)


class Watch:
    """The runs at and under a folder, in which runs may appear and vanish.

    One thread calls `update`, and another one `ask`, which may wait for SLURM; both may read the attributes.

    Args:
        root: the folder; it need not exist.
        clock: monotonic seconds.
        ask: as `query_jobs`.

    Attributes:
        root: the folder.
        runs: newest first.
        query: SLURM's answers.
        has_looked: whether all runs have been read once.
        problem: why runs couldn't be searched for at the last update; empty without a problem.
    """

    def __init__(self, root: Path, clock: Callable[[], float] = time.monotonic, ask: Ask = query_jobs) -> None:
        self.root = root
        self.runs: tuple[WatchedRun, ...] = ()
        self.query = JobQuery(clock, ask)
        self._clock = clock
        self.has_looked = False
        self.problem = ""
        self._found_at = float("-inf")

    def update(self) -> None:
        """Read what is new of all runs."""
        if self._clock() - self._found_at >= FIND_EVERY_S:
            try:
                self._find()
                self.problem = ""
            except OSError as error:
                self.problem = describe_os_error(error)
            self._found_at = self._clock()
        answers = self.query.answers
        for run in self.runs:
            run.update(answers)
        self.has_looked = True
        if any(run.gone for run in self.runs):
            self.runs = tuple(run for run in self.runs if not run.gone)

    def find_soon(self) -> None:
        """Search for runs at the next update."""
        self._found_at = float("-inf")

    def ask(self, warn: Printer) -> bool:
        """Ask SLURM about all jobs that may change, if that is due; return whether it was asked.

        Args:
            warn: gets a line if SLURM is there and doesn't answer.
        """
        if not (self.has_looked and self.query.is_due):
            return False
        job_ids = [job_id for run in self.runs if not run.settled for job_id in run.status.job_ids]
        self.query.ask(job_ids, warn)
        return bool(job_ids)

    def _find(self) -> None:
        watched = {run.directory.path: run for run in self.runs}
        directories = find_runs(self.root)
        self.runs = tuple(watched.get(run.path) or WatchedRun(run, self._name(run), self._clock) for run in directories)

    def _name(self, run: RunDirectory) -> str:
        name = os.path.relpath(run.path, self.root)
        return run.path.name if name == "." else name
