"""The records of a run's jobs: submissions to the scheduler, and cancellations.

A job that trains one run after another, as those of a search do, also records when it begins to work for a run, and
when it leaves it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.files import append_json_line, read_json_lines
from hpctrain.run.directory import RunDirectory
from hpctrain.run.record_fields import COUNT, FLAG, PATH, TEXT, TIME, require_fields

_FIELD_TYPES = {
    "job_id": TEXT,
    "time": TIME,
    "log": PATH,
    "restarts": COUNT,
    **dict.fromkeys(("cancelled", "began", "left", "waited", "continues"), FLAG),
}


@dataclass(frozen=True, slots=True)
class JobRecords:
    """The submissions and cancellations of a run, and the jobs that began to work for it and left it.

    Args:
        directory: of the run.
    """

    directory: RunDirectory

    def add(self, record: dict[str, object]) -> None:
        """Add a submission: ``job_id``, ``time`` (epoch seconds), ``log`` (the batch script's); or a cancellation.

        A cancellation has ``time`` and ``cancelled``; False withdraws an earlier one.
        """
        with self.directory.permissions():
            append_json_line(self.directory.jobs, record, durable=True)

    def begin(self, job_id: str, restarts: int, log: Path | None = None) -> None:
        """Record that a job begins to work for the run, unless it has begun already; like a submission.

        Args:
            job_id: as users type it.
            restarts: how often it has been requeued.
            log: of its batch script; None if it is unknown.
        """
        earlier = self._of(job_id)
        if earlier and earlier[-1].get("began"):
            return
        where = {} if log is None else {"log": str(log)}
        self.add({"job_id": job_id, "time": time.time(), "began": True, "restarts": restarts, **where})

    def wait(self, job_id: str) -> None:
        """Record that a job of the run started, and goes back to the queue because the run waits for other runs."""
        self.add({"job_id": job_id, "time": time.time(), "waited": True})

    def waits(self, job_id: str) -> int:
        """Number of times that a job went back to the queue because the run waits for other runs."""
        return sum(bool(record.get("waited")) for record in self._of(job_id))

    def continues(self, job_id: str) -> bool:
        """Whether a job was submitted in the place of another, to continue the run."""
        return any(bool(record.get("continues")) for record in self._of(job_id))

    def leave(self, job_id: str) -> None:
        """Record that a job has stopped working for the run, though it may still be queued or running."""
        self.add({"job_id": job_id, "time": time.time(), "left": True})

    def read(self) -> list[dict[str, Any]]:
        """Return all records, oldest first.

        Raises:
            RunDirectoryError: a record has a field that can't be.
        """
        path = self.directory.jobs
        records = list(read_json_lines(path))
        for record in records:
            require_fields(path, record, _FIELD_TYPES, required=("time",))
        return records

    def is_own(self, job_id: str) -> bool:
        """Whether hpctrain submitted a job for this run alone."""
        return any(not any(map(record.get, ("began", "left", "waited"))) for record in self._of(job_id))

    def restarts_before(self, job_id: str) -> int:
        """Number of requeues of a job before it began to work for the run; 0 for a job of this run alone."""
        began = [record for record in self._of(job_id) if record.get("began")]
        return int(began[-1].get("restarts", 0)) if began else 0

    def _of(self, job_id: str) -> list[dict[str, Any]]:
        return [record for record in self.read() if record.get("job_id") == job_id]

    @property
    def batch_log(self) -> Path | None:
        """The log of the newest job's batch script, whether it exists or not; None without a job."""
        logs = [str(record["log"]) for record in self.read() if record.get("log")]
        return Path(logs[-1]) if logs else None


def cancelled_at(records: Sequence[Mapping[str, Any]]) -> float | None:
    """When the user cancelled the run, in epoch seconds; None if they didn't, or a job was submitted afterwards.

    Args:
        records: of the run's jobs, as `JobRecords.read` returns them.
    """
    # that a job left the run follows from a cancellation, and doesn't withdraw it; nor does a wait that was about to be
    # recorded
    relevant_records = (record for record in reversed(records) if not (record.get("left") or record.get("waited")))
    last: Mapping[str, Any] = next(relevant_records, {})
    return float(last["time"]) if last.get("cancelled") else None
