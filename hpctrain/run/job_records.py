"""The records of a run's jobs: submissions to the scheduler, and cancellations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.files import append_json_line, read_json_lines
from hpctrain.run.directory import RunDirectory
from hpctrain.run.record_fields import FLAG, PATH, TEXT, TIME, require_fields

_FIELD_TYPES = {"job_id": TEXT, "time": TIME, "log": PATH, "cancelled": FLAG}


@dataclass(frozen=True, slots=True)
class JobRecords:
    """The submissions and cancellations of a run.

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

    def read(self) -> list[dict[str, Any]]:
        """Return the submissions and cancellations, oldest first.

        Raises:
            RunDirectoryError: a record has a field that can't be.
        """
        records = list(read_json_lines(self.directory.jobs))
        for record in records:
            require_fields(self.directory.jobs, record, _FIELD_TYPES, required=("time",))
        return records

    @property
    def batch_log(self) -> Path | None:
        """The log of the newest job's batch script, whether it exists or not; None without a job."""
        logs = [str(record["log"]) for record in self.read() if record.get("log")]
        return Path(logs[-1]) if logs else None

    @property
    def cancelled_at(self) -> float | None:
        """When the user cancelled the run, in epoch seconds; None if they didn't, or a job was submitted afterwards."""
        return cancelled_at(self.read())


def cancelled_at(records: Sequence[Mapping[str, Any]]) -> float | None:
    """When the user cancelled the run, by its submissions and cancellations; see `JobRecords.cancelled_at`."""
    last = records[-1] if records else {}
    return float(last["time"]) if last.get("cancelled") else None
