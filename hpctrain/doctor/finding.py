"""What the doctor found, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Severity(StrEnum):
    """How much a finding matters; the most severe first."""

    ERROR = "error"
    """A run would fail, or could not continue after an interruption."""
    WARNING = "warning"
    """Runs work, but lose time or steps."""
    NOTE = "note"
    """Worth knowing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that isn't as it should be.

    Attributes:
        check: what was checked, such as `folder` or `network`; the same word in every version.
        severity: how much it matters.
        problem: what was found, in one line that names the node, if there is one.
        why: what it does to a run.
        remedy: what to type or change.
        nodes: the nodes at fault; empty for a finding on this machine or on the cluster.
    """

    check: str
    severity: Severity
    problem: str
    why: str
    remedy: str
    nodes: tuple[str, ...] = ()

    def as_record(self) -> dict[str, Any]:
        """The finding for JSON."""
        return asdict(self)


def in_order(findings: list[Finding]) -> list[Finding]:
    """The findings, the most severe first; equal ones in the order in which they were found."""
    severities = list(Severity)
    return sorted(findings, key=lambda one: severities.index(one.severity))
