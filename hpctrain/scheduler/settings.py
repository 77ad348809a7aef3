"""SLURM's settings, as far as they decide what becomes of a run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.errors import SchedulerError

_LINE = re.compile(r"^(\S[^=\n]*?)\s*= ?(.*)$", re.MULTILINE)
_FIELD = re.compile(r"(?:^|\s)([A-Za-z]+)=(\S*)")
_DURATION = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")


@dataclass(frozen=True, slots=True)
class Settings:
    """The output of `scontrol show config`.

    Attributes:
        values: by name, such as `JobRequeue`; names and values as SLURM prints them.
    """

    values: Mapping[str, str]

    def text(self, name: str) -> str:
        """A value; empty if it isn't set, or this version of SLURM doesn't have it."""
        value = self.values.get(name, "").strip()
        return "" if value in {"(null)", "N/A", "none"} else value

    def number(self, name: str) -> int | None:
        """The number at the beginning of a value such as `30 sec`; None if there is none."""
        match = re.match(r"\d+", self.text(name))
        return None if match is None else int(match[0])

    @property
    def cluster(self) -> str:
        """The cluster's name."""
        return self.text("ClusterName")

    @property
    def version(self) -> str:
        """SLURM's version, such as `22.05.8`."""
        return self.text("SLURM_VERSION")


@dataclass(frozen=True, slots=True)
class Partition:
    """A partition, as `scontrol show partition` describes it.

    Attributes:
        values: by name, such as `MaxTime`.
    """

    values: Mapping[str, str]

    @property
    def name(self) -> str:
        """Its name."""
        return self.values.get("PartitionName", "")

    @property
    def is_default(self) -> bool:
        """Whether jobs without `cluster.partition` run here."""
        return self.values.get("Default") == "YES"

    @property
    def state(self) -> str:
        """`UP` if it takes and starts jobs."""
        return self.values.get("State", "UP")

    @property
    def max_time_min(self) -> int | None:
        """Most minutes of a job; None without a limit."""
        return minutes(self.values.get("MaxTime", ""))

    @property
    def max_nodes(self) -> int | None:
        """Most nodes of a job: the limit, or all of the partition's nodes if those are fewer; None if unknown."""
        limits = (self.values.get(name, "") for name in ("MaxNodes", "TotalNodes"))
        return min((int(text) for text in limits if text.isdecimal()), default=None)

    @property
    def grace_time_s(self) -> int:
        """Seconds from the signal to the kill at a preemption."""
        text = self.values.get("GraceTime", "0")
        return int(text) if text.isdecimal() else 0

    @property
    def preempt_mode(self) -> str:
        """The effect of a preemption on its jobs: `OFF`, `REQUEUE`, `CANCEL` or `SUSPEND`."""
        return self.values.get("PreemptMode", "OFF")


@dataclass(frozen=True, slots=True)
class Association:
    """A user's place in an account, as `sacctmgr show associations` describes it.

    Attributes:
        account: its name.
        max_wall_min: minutes of a job; None without a limit.
    """

    account: str
    max_wall_min: int | None


ASSOCIATION_FORMAT = "Account,MaxWall"
"""For `sacctmgr --format`."""


def associations(answer: str) -> list[Association]:
    """Parse the output of `sacctmgr --noheader --parsable2 show associations format=ASSOCIATION_FORMAT`."""
    rows = (line.split("|") for line in answer.splitlines())
    return [Association(row[0], minutes(row[1])) for row in rows if len(row) == 2]


def settings(answer: str) -> Settings:
    """Parse the output of `scontrol show config`.

    Raises:
        SchedulerError: it has no SLURM_VERSION.
    """
    values = {name.strip(): value.strip() for name, value in _LINE.findall(answer)}
    if "SLURM_VERSION" not in values:
        raise SchedulerError(f"expected SLURM_VERSION in the output of `scontrol show config`, found {answer[:200]!r}")
    return Settings(values)


def partitions(answer: str) -> list[Partition]:
    """Parse the output of `scontrol --oneliner show partition`."""
    return [Partition(record) for record in records(answer) if "PartitionName" in record]


def records(answer: str) -> list[dict[str, str]]:
    """Parse the output of `scontrol --oneliner show`: the fields of each line, field to value."""
    return [dict(_FIELD.findall(line)) for line in answer.splitlines()]


def minutes(text: str) -> int | None:
    """Parse a duration such as `1-12:00:00`, `02:00:00` or `30:00`; None for `UNLIMITED` and the like."""
    match = _DURATION.fullmatch(text)
    if match is None:
        return None
    days, hours, mins, _ = (int(part or 0) for part in match.groups())
    return days * 1440 + hours * 60 + mins
