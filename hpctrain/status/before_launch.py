"""Check, before a launch, that a run has stopped, and how far its dependencies are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpctrain.errors import RunDirectoryError, SchedulerError
from hpctrain.run.directory import RunDirectory
from hpctrain.scheduler.slurm import Slurm
from hpctrain.status.jobs import Jobs, RunRecords, present_jobs, query_jobs, readable_records
from hpctrain.status.run_status import RunStatus, status_of
from hpctrain.status.state import RunState

STOPPED = (RunState.FAILED, RunState.CANCELLED, RunState.INTERRUPTED, RunState.PAUSED)
"""States of runs that don't complete unless a user resumes them."""
GONE = "its directory is gone"
"""The reason for the state of a run that was removed."""


def require_stopped(directory: RunDirectory, *, force: bool = False) -> RunStatus:
    """Return the run's status if it is stopped: a run must never have two attempts at once.

    Args:
        directory: the run.
        force: whether the user insists that its job is over, where SLURM can't be reached.

    Raises:
        RunDirectoryError: the run is queued, starting or running; or it may be, and SLURM can't be reached; or its
            records can't be read.
    """
    (status,) = statuses_before_launch([directory], force=force)
    if status.state is RunState.UNREADABLE:
        raise RunDirectoryError(status.note)
    if status.state.may_change:
        remedy = f"end it first: `python -m hpctrain cancel {directory.as_typed}`"
        raise RunDirectoryError(f"{directory.path} is {status.state}; {remedy}")
    return status


def statuses_before_launch(directories: Sequence[RunDirectory], *, force: bool = False) -> list[RunStatus]:
    """Read the statuses of runs that are to be launched; a run whose records can't be read is `unreadable`.

    SLURM is queried once for all of them.

    Raises:
        RunDirectoryError: one of them may be queued or running, and SLURM can't be reached; see `require_stopped`.
    """
    problem = ""
    run_records = [readable_records(directory) for directory in directories]
    jobs: Jobs | None = None
    try:
        jobs = Slurm().find(present_jobs(run_records))
    except SchedulerError as error:
        problem = " ".join(str(error).split())
    statuses = []
    for directory, records in zip(directories, run_records, strict=True):
        status = status_of(directory, jobs, records)
        if jobs is None and not force and not status.state.may_change and status.job_that_may_run is not None:
            raise RunDirectoryError(
                f"{directory.path}: job {status.job_that_may_run} may still be queued or running, and SLURM can't be "
                f"asked ({problem}); run this where squeue works, or insist: `python -m hpctrain resume "
                f"{directory.as_typed} --force`"
            )
        statuses.append(status)
    return statuses


@dataclass(frozen=True, slots=True)
class OtherRuns:
    """The runs that another one waits for, by how far they are; completed ones are left out.

    Attributes:
        going: those that may complete by themselves: queued, running, or not started yet; or their state is unknown.
        stopped: those that failed, were cancelled or removed, or are interrupted or paused.
        job_ids: the jobs of `going` that are queued or running.
    """

    going: tuple[RunStatus, ...]
    stopped: tuple[RunStatus, ...]
    job_ids: tuple[str, ...]

    @classmethod
    def read(cls, paths: Sequence[str], ask: Callable[[Sequence[str]], Jobs | None] = query_jobs) -> OtherRuns:
        """Read the states of runs; SLURM is queried once.

        Args:
            paths: their directories.
            ask: queries SLURM for jobs, as `query_jobs` does.
        """
        directories = [RunDirectory.at(path) for path in paths]
        run_records = [readable_records(directory) for directory in directories]
        present_ids = present_jobs(run_records)
        jobs = ask(present_ids) if present_ids else {}
        going: list[RunStatus] = []
        stopped: list[RunStatus] = []
        job_ids: list[str] = []
        for directory, records in zip(directories, run_records, strict=True):
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
    pairs = ((job_id, (jobs or {}).get(job_id)) for job_id in (records.present_job_ids if records else ()))
    return [job_id for job_id, record in pairs if record is not None and not record.state.is_finished]
