"""Findings, and the result of an examination.

Nodes and ranks only record what they saw. Functions of these records decide what it means, where the command was typed:
they are tested without a cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from hpctrain.phrases import listed


def exclude_remedy(nodes: Sequence[str]) -> str:
    """The remedy that leaves the nodes at fault out."""
    return f"set cluster.exclude={','.join(nodes)}, and tell the cluster's administrators"


def exclude_alternative(nodes: Sequence[str]) -> str:
    """The end of another remedy: how to leave the nodes at fault out instead."""
    return f"; or leave {listed(nodes)} out: cluster.exclude={','.join(nodes)}"


class Severity(StrEnum):
    """Severity of a finding, the most severe first."""

    ERROR = "error"
    """A run would fail, or could not continue after an interruption."""
    WARNING = "warning"
    """Runs work, but lose time or steps."""
    NOTE = "note"
    """Worth knowing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that isn't as it should be.

    Each subject has a function that yields its findings: `nodes.node_findings` and `unanswered_job`,
    `rank_findings.rank_findings`, `slurm_findings.slurm_findings`, `folder_check.check_folder` and
    `disk_space_findings`, and `measurements.compare_with_baseline`. A finding on something new also needs its
    measurement: on each node in `nodes.SCRIPT`, in each rank in `rank`.

    Attributes:
        check: what was checked, such as `folder` or `network`; the same word in every version.
        severity: how much it matters.
        problem: what was found, in one line that names the node, if there is one.
        why: what it does to a run.
        remedy: what to type or change.
        nodes: the nodes at fault; empty for a finding on this machine or on the cluster.
    """

    check: str
    severity: Severity = Severity.ERROR
    problem: str
    why: str
    remedy: str
    nodes: tuple[str, ...] = ()


@dataclass(slots=True)
class DoctorResult:
    """Result of an examination.

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

    def add_job(self, folder: Path, job_id: str) -> None:
        """Add the job, and the folder of its answers."""
        self.folder = folder
        self.job_id = job_id

    @property
    def would_fail(self) -> bool:
        """Whether something would fail a run."""
        return any(finding.severity is Severity.ERROR for finding in self.findings)

    @property
    def ordered(self) -> list[Finding]:
        """The findings, the most severe first; equal ones in the order in which they were found."""
        severities = list(Severity)
        return sorted(self.findings, key=lambda finding: severities.index(finding.severity))

    def as_record(self) -> dict[str, Any]:
        """All of it for JSON."""
        return {
            "would_fail": self.would_fail,
            **asdict(replace(self, findings=self.ordered)),
            "folder": self.folder and str(self.folder),
            "site_file": self.site_file and str(self.site_file),
        }
