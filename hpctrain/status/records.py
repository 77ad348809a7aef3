"""The records from which the state of a run is derived, read together."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain.errors import RunDirectoryError
from hpctrain.run.directory import RunDirectory
from hpctrain.run.job_records import JobRecords, cancelled_at
from hpctrain.run.ledger import Attempt, Ledger
from hpctrain.scheduler.slurm import JOB_ID


@dataclass(frozen=True, slots=True)
class RunRecords:
    """What the ledger of a run and the records of its jobs had when they were read.

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
        """The jobs that work for the run no longer: they train other runs, or are over."""
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
        left = self.left_jobs
        return tuple(job_id for job_id in self.job_ids if job_id not in left)

    @property
    def cancelled_at(self) -> float | None:
        """When the user cancelled the run, in epoch seconds; None if they didn't, or a job was submitted afterwards."""
        return cancelled_at(self.submissions)

    @property
    def submission(self) -> tuple[str, float] | None:
        """Job id and time of the newest submission, in epoch seconds; None without one, or if the job has left."""
        submissions = [one for one in self.submissions if one.get("job_id") and not one.get("waited")]
        named = [(str(record["job_id"]), float(record["time"])) for record in submissions]
        return named[-1] if named and named[-1][0] not in self.left_jobs else None


def readable_records(directory: RunDirectory) -> RunRecords | None:
    """Read the records of a run; None if they can't be read, which is the state `unreadable`."""
    with contextlib.suppress(OSError, RunDirectoryError):
        return RunRecords.read(directory)
    return None


def present_jobs(known: Sequence[RunRecords | None]) -> list[str]:
    """The jobs that may still work for any of several runs."""
    return [job_id for records in known if records is not None for job_id in records.present_job_ids]
