"""The result of an examination."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.doctor.finding import Finding, Severity, in_order


@dataclass(slots=True)
class Examined:
    """What is known at the end.

    Attributes:
        facts: by name, for the reader.
        findings: in the order in which they were found.
        measured: what the ranks measured together.
        figures: of the measurements, as they are compared with the baseline.
        folder: of the job's answers; None without a job.
        job_id: of the job.
        site_file: that was written; None if none was.
    """

    facts: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    measured: dict[str, Any] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    folder: Path | None = None
    job_id: str | None = None
    site_file: Path | None = None

    @property
    def would_fail(self) -> bool:
        """Whether something would fail a run."""
        return any(one.severity is Severity.ERROR for one in self.findings)

    def as_record(self) -> dict[str, Any]:
        """All of it for JSON."""
        return {
            "would_fail": self.would_fail,
            "findings": [one.as_record() for one in in_order(self.findings)],
            "facts": self.facts,
            "figures": self.figures,
            "measured": self.measured,
            "folder": None if self.folder is None else str(self.folder),
            "job_id": self.job_id,
            "site_file": None if self.site_file is None else str(self.site_file),
        }


def summary(examined: Examined) -> Mapping[Severity, int]:
    """The number of findings of each severity."""
    return {one: sum(found.severity is one for found in examined.findings) for one in Severity}
