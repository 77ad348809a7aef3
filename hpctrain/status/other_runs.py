"""The runs for which a run waits (`after`): which of them may still complete, and which have stopped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpctrain.run.directory import RunDirectory
from hpctrain.status.records import RunRecords, present_jobs, readable_records
from hpctrain.status.report import Jobs, ask_slurm, status_of
from hpctrain.status.run_status import RunStatus
from hpctrain.status.state import RunState

STOPPED = (RunState.FAILED, RunState.CANCELLED, RunState.INTERRUPTED, RunState.PAUSED)
"""States of runs that don't complete unless someone resumes them."""
GONE = "its directory is gone"
"""The reason for the state of a run that was removed."""


@dataclass(frozen=True, slots=True)
class OtherRuns:
    """How far the runs are for which another one waits; those that have completed are left out.

    Attributes:
        going: those that may complete by themselves: queued, running, or not started yet; or their state is unknown.
        stopped: those that failed, were cancelled or removed, or are interrupted or paused.
        job_ids: the jobs of `going` that are queued or running.
    """

    going: tuple[RunStatus, ...]
    stopped: tuple[RunStatus, ...]
    job_ids: tuple[str, ...]

    @classmethod
    def look(cls, paths: Sequence[str], ask: Callable[[Sequence[str]], Jobs | None] = ask_slurm) -> OtherRuns:
        """Read the states of runs; SLURM is queried once.

        Args:
            paths: their directories.
            ask: queries SLURM for jobs, as `ask_slurm` does.
        """
        directories = [RunDirectory.at(path) for path in paths]
        known = [readable_records(directory) for directory in directories]
        asked = present_jobs(known)
        jobs = ask(asked) if asked else {}
        going: list[RunStatus] = []
        stopped: list[RunStatus] = []
        job_ids: list[str] = []
        for directory, records in zip(directories, known, strict=True):
            status = _status(directory, records, jobs)
            if status.state is RunState.COMPLETED:
                continue
            # SLURM may run a job of which only SLURM knows
            in_doubt = jobs is None and status.job_that_may_run is not None
            if status.note == GONE or (status.state in STOPPED and not in_doubt):
                stopped.append(status)
            else:
                going.append(status)
                job_ids += _unfinished(records, jobs)
        return cls(tuple(going), tuple(stopped), tuple(dict.fromkeys(job_ids)))


def _status(directory: RunDirectory, records: RunRecords | None, jobs: Jobs | None) -> RunStatus:
    status = status_of(directory, jobs, records, brief=True)
    # without its parent, its file system is missing on this machine
    is_gone = not directory.config.is_file() and directory.path.parent.is_dir()
    if status.state is RunState.PREPARED and is_gone:
        return RunStatus(name=directory.path.name, path=directory.path, state=RunState.UNREADABLE, note=GONE)
    return status


def _unfinished(records: RunRecords | None, jobs: Jobs | None) -> list[str]:
    found = ((job_id, (jobs or {}).get(job_id)) for job_id in (records.present_job_ids if records else ()))
    return [job_id for job_id, record in found if record is not None and not record.state.is_finished]
