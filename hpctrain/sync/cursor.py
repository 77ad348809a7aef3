"""The cursor of a service: how much of a run it has."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path

from hpctrain.files import read_json_or_empty, write_json
from hpctrain.run.directory import RunDirectory
from hpctrain.run.record_fields import COUNT, FLAG, TEXT, TIME, describe_wrong_field

_FIELD_TYPES = {
    "run_id": TEXT,
    "address": TEXT,
    "digest": TEXT,
    "destination": TEXT,
    "confirmed_step": COUNT,
    "handed_over_step": COUNT,
    "state": TEXT,
    "complete": FLAG,
    "problem": TEXT,
    "time": TIME,
}
NOTHING = -1
"""The step before the first one."""
UNKNOWN = 2**62
"""Stands for any step: rows up to it may be there."""


@dataclass(slots=True, kw_only=True)
class Cursor:
    """What is known of a run at a service.

    It saves work and decides nothing: if the file is lost or can't be parsed, a sender asks the service.

    Attributes:
        run_id: the service's id of the run; empty before it was made.
        address: of the run's page; empty if unknown.
        digest: of the run to which the file belongs: a copy of its directory has another one.
        destination: where the run was sent, as `Service.destination` names it.
        confirmed_step: the service has all rows up to this step; None for none.
        handed_over_step: rows up to this step may be there, since a sender handed them over; None for none.
        state: of the run, as it was last reported.
        complete: whether the service has all rows of a run that has ended.
        problem: why the last sending failed, in one line; empty if it didn't.
        time: when it was written, in epoch seconds.
    """

    run_id: str = ""
    address: str = ""
    digest: str = ""
    destination: str = ""
    confirmed_step: int | None = None
    handed_over_step: int | None = None
    state: str = ""
    complete: bool = False
    problem: str = ""
    time: float = 0.0

    @property
    def after(self) -> int:
        """The last step whose row need not be sent."""
        return NOTHING if self.confirmed_step is None else self.confirmed_step

    @classmethod
    def read(cls, directory: RunDirectory, service: str) -> Cursor:
        """Read a service's cursor; without one, or with one that can't be parsed, everything is in doubt."""
        path = cursor_path(directory, service)
        record = {name: value for name, value in read_json_or_empty(path).items() if value is not None}
        if not record or describe_wrong_field(record, _FIELD_TYPES):
            return cls(handed_over_step=UNKNOWN) if path.exists() else cls()
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in record.items() if name in known})

    def write(self, directory: RunDirectory, service: str) -> None:
        """Replace the service's cursor, durably.

        Raises:
            OSError: the file system's error.
        """
        write_json(cursor_path(directory, service), asdict(self))


def cursor_path(directory: RunDirectory, service: str) -> Path:
    """The file of a service's cursor."""
    return directory.sync / f"{service}.json"
