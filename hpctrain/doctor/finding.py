"""Findings, the entries of the tables from which they come, and the result of an examination."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Generic, TypeVar

from hpctrain.phrases import listed

Measured = TypeVar("Measured")
Case = Mapping[str, Any]
"""The values of one case of a check, by the names that its templates use; see `Check`."""
EXCLUDE = "set cluster.exclude={exclude}, and tell the cluster's administrators"
OR_EXCLUDE = "; or leave {nodes} out: cluster.exclude={exclude}"
"""Remedies, or parts of them, that leave out the nodes at fault."""


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


@dataclass(frozen=True, slots=True)
class Check(Generic[Measured]):
    """A kind of findings, an entry of the table of its subject.

    `nodes` has NODE_CHECKS and JOB_CHECKS, `rank_findings` RANK_CHECKS, `slurm_findings` SLURM_CHECKS and
    SILENCE_CHECKS, `folder_check` ROOM_CHECKS and TRIALS (each a `Trial`), `measurements` BASELINE_CHECKS, and
    `examination` TORCH_MISSING alone. A check of something new also needs its measurement: on each node in
    `nodes.SCRIPT`, in each rank in `rank`.

    The three texts are templates for `str.format`, with the values of a case, `measured`, and of the case's nodes:
    `nodes`, the first few names, and `exclude`, all of them as `cluster.exclude` has them.

    Attributes:
        check, severity: of its findings.
        cases: the condition: returns the values of each case that was measured, empty if there is none. `nodes` are
            the nodes at fault, and `severity` is that of the case, if it has another one.
        problem, why, remedy: templates of the texts.
    """

    check: str
    severity: Severity
    cases: Callable[[Measured], Iterable[Case]]
    problem: str
    why: str
    remedy: str

    def findings(self, measured: Measured) -> Iterator[Finding]:
        """The finding of each case."""
        for case in self.cases(measured):
            nodes = tuple(case.get("nodes", ()))
            values = {**case, "measured": measured, "nodes": listed(nodes), "exclude": ",".join(nodes)}
            yield Finding(
                check=self.check,
                severity=case.get("severity", self.severity),
                problem=self.problem.format_map(values),
                why=self.why.format_map(values),
                remedy=self.remedy.format_map(values),
                nodes=nodes,
            )


def when(condition: object, **case: Any) -> list[Case]:
    """One case if the condition is true, otherwise none."""
    return [case] if condition else []


def evaluate(table: Iterable[Check[Measured]], measured: Measured) -> list[Finding]:
    """The findings of all checks of a table."""
    return [finding for check in table for finding in check.findings(measured)]


@dataclass(slots=True)
class DoctorResult:
    """What is known at the end of an examination.

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
            "findings": [asdict(finding) for finding in self.ordered],
            "facts": self.facts,
            "figures": self.figures,
            "measured": self.measured,
            "folder": self.folder and str(self.folder),
            "job_id": self.job_id,
            "site_file": self.site_file and str(self.site_file),
        }
