"""What a run must be before it is launched again: a run must never have two attempts at once."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.errors import RunDirectoryError, SchedulerError
from hpctrain.run.directory import RunDirectory
from hpctrain.scheduler.slurm import Slurm
from hpctrain.status.records import present_jobs, readable_records
from hpctrain.status.report import Jobs, status_of
from hpctrain.status.run_status import RunStatus
from hpctrain.status.state import RunState


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
    known = [readable_records(directory) for directory in directories]
    jobs: Jobs | None = None
    try:
        jobs = Slurm().find(present_jobs(known))
    except SchedulerError as error:
        problem = " ".join(str(error).split())
    statuses = [status_of(directory, jobs, records) for directory, records in zip(directories, known, strict=True)]
    for directory, status in zip(directories, statuses, strict=True):
        if jobs is None and not force and not status.state.may_change and status.job_that_may_run is not None:
            raise RunDirectoryError(
                f"{directory.path}: job {status.job_that_may_run} may still be queued or running, and SLURM can't be "
                f"asked ({problem}); run this where squeue works, or insist: `python -m hpctrain resume "
                f"{directory.as_typed} --force`"
            )
    return statuses
