"""Parse the values in SLURM's answers."""

from __future__ import annotations

import logging
import re

from hpctrain.errors import SchedulerError

_NOTHING = frozenset({"", "(null)", "None", "NONE", "N/A", "n/a", "Unknown", "NOT_SET"})
_TASKS = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")
_MOST_TASKS = 4_000_001  # SLURM's own bound on MaxArraySize

log = logging.getLogger("hpctrain.scheduler")


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


def optional_number(value: str) -> int | None:
    """Parse a whole number that hpctrain can do without; None if it isn't one, which is logged."""
    try:
        return number(value)
    except SchedulerError:
        log.warning("can't parse the number %r in SLURM's answer; treating it as unknown", value)
        return None


def moment(value: str) -> int | None:
    """Parse a time in seconds since the epoch, as `command.run` has SLURM print it; None if there is none."""
    return (optional_number(value) or None) if text(value) else None


def array_tasks(job_id: str) -> list[str]:
    """Expand the id of a row: `12_[4-6%2]` into `12_4`, `12_5` and `12_6`; any other id into itself.

    Raises:
        SchedulerError: the tasks can't be read.
    """
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
