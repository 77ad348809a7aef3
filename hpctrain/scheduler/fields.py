"""Parse the values in SLURM's answers."""

from __future__ import annotations

import re
from datetime import datetime

from hpctrain.cluster import nodelist
from hpctrain.errors import ClusterEnvironmentError, SchedulerError

_NOTHING = frozenset({"", "(null)", "None", "NONE", "N/A", "n/a", "Unknown", "None assigned", "NOT_SET"})
_NO_LIMIT = frozenset({"UNLIMITED", "INVALID", "Partition_Limit"})
_DURATION = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")
_TASKS = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")
_MOST_TASKS = 4_000_001  # SLURM's own bound on MaxArraySize


def text(value: str) -> str:
    """Parse a text; empty for any of SLURM's spellings of a missing value."""
    return "" if value.strip() in _NOTHING else value.strip()


def number(value: str) -> int:
    """Parse a whole number.

    Raises:
        SchedulerError: it isn't a number.
    """
    try:
        return int(value)
    except ValueError:
        raise SchedulerError(f"expected a number in SLURM's answer, found {value!r}") from None


def moment(value: str) -> int | None:
    """Parse a time, a number or `2026-01-31T12:00:00` in this machine's time zone, into seconds since the epoch."""
    given = text(value)
    if not given:
        return None
    if given.isdigit():
        return int(given) or None
    try:
        return int(datetime.fromisoformat(given).timestamp())
    except ValueError:
        raise SchedulerError(f"expected a time in SLURM's answer, found {value!r}") from None


def duration_s(value: str) -> int | None:
    """Parse seconds from `5:00` (minutes and seconds), `01:00:00` or `365-00:00:00`; None for no limit."""
    given = text(value)
    if not given or given in _NO_LIMIT:
        return None
    found = _DURATION.fullmatch(given)
    if found is None:
        raise SchedulerError(f"expected a time limit such as 1-00:00:00 in SLURM's answer, found {value!r}")
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def exit_code(value: str) -> tuple[int, int] | None:
    """Parse exit code and signal from `3:0`, or from the wait status (768) that squeue prints up to SLURM 22.05."""
    given = text(value)
    if not given:
        return None
    if ":" in given:
        code, signal = given.split(":", 1)
        return number(code), number(signal)
    status = number(given)
    return status >> 8 & 0xFF, status & 0x7F


def nodes(value: str) -> tuple[str, ...]:
    """Parse a list of nodes into their names.

    Raises:
        SchedulerError: they can't be read.
    """
    given = text(value)
    try:
        return tuple(nodelist.expand(given)) if given else ()
    except ClusterEnvironmentError as error:
        raise SchedulerError(f"expected a node list in SLURM's answer, found {value!r}") from error


def array_tasks(job_id: str) -> list[str]:
    """Expand the id of a row: `12_[4-6%2]` into `12_4`, `12_5` and `12_6`; any other id into itself."""
    array, bracket, tasks = job_id.partition("_[")
    if not bracket:
        return [job_id]
    ids: list[str] = []
    for part in tasks.rstrip("]").split("%")[0].split(","):
        found = _TASKS.fullmatch(part)
        if found is None or int(found[2] or 0) > _MOST_TASKS:
            raise SchedulerError(f"expected the tasks of a job array such as 12_[4-6%2], found {job_id!r}")
        first, last, step = int(found[1]), int(found[2] or found[1]), int(found[3] or 1)
        ids += (f"{array}_{task}" for task in range(first, last + 1, step))
    return ids
