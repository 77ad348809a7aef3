"""The folder of one examination, which the job and the command share; it isn't a run directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hpctrain.run.directory import RunDirectory


@dataclass(frozen=True, slots=True)
class DoctorFolder:
    """The paths of an examination.

    Args:
        path: the folder, absolute.
    """

    path: Path

    @property
    def request(self) -> Path:
        """The configuration, as a run would store it."""
        return self.path / "request.yaml"

    @property
    def asked(self) -> Path:
        """What the command asked for beside it."""
        return self.path / "asked.json"

    @property
    def token(self) -> Path:
        """A text by which nodes recognise the folder."""
        return self.path / "token"

    @property
    def nodes(self) -> Path:
        """A file of each node that can write here."""
        return self.path / "nodes"

    @property
    def job(self) -> Path:
        """What the batch script knows, after each step; see `JobRecord`."""
        return self.path / "job.json"

    @property
    def ranks(self) -> Path:
        """A record of each rank."""
        return self.path / "ranks"

    def rank(self, rank: int) -> Path:
        """The record of one rank."""
        return self.ranks / f"{rank}.json"

    @property
    def measured(self) -> Path:
        """What the ranks measured together."""
        return self.path / "measured.json"

    @property
    def findings(self) -> Path:
        """The result, as `doctor --json` prints it."""
        return self.path / "findings.json"

    @property
    def baseline(self) -> Path:
        """The first measurements, which later examinations beside this one are compared with."""
        return self.path.parent / "baseline.json"

    @property
    def as_run(self) -> RunDirectory:
        """The same folder, for the parts of a launch that log and submit there."""
        return RunDirectory.at(self.path)
