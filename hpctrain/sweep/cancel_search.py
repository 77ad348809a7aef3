"""Cancel a search or a sweep: its tasks, or the process that trains it on one machine, begin no further run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from hpctrain.errors import HpctrainError
from hpctrain.files import write_json
from hpctrain.phrases import counted
from hpctrain.run.directory import RunDirectory
from hpctrain.scheduler.job import SlurmJob
from hpctrain.scheduler.slurm import Slurm
from hpctrain.status.report import ask_slurm, job_ids
from hpctrain.streams import Printer, print_warning


def search_home(typed: str, runs_dir: Path) -> RunDirectory | None:
    """Return the folder of a sweep whose tasks ask for their runs; None if the user named something else.

    Args:
        typed: as the user names it: a path, or a name under ``runs_dir``.
        runs_dir: the folder that contains the runs.
    """
    home = sweep_home(typed, runs_dir)
    return home if home is not None and home.jobs.is_file() else None


def sweep_home(typed: str, runs_dir: Path) -> RunDirectory | None:
    """Return the folder of a sweep; None if the user named something else, with the arguments of `search_home`."""
    folders = [RunDirectory.at(folder) for folder in (Path(typed), runs_dir / typed)]
    return next((folder for folder in folders if folder.sweep.is_file()), None)


def cancel_on_machine(home: RunDirectory, *, runs: Sequence[RunDirectory]) -> str:
    """Keep the process that trains a sweep on one machine from beginning another run.

    Call it before the runs are cancelled. The next launch or resume of the sweep removes the file that this writes.

    Returns:
        What was done, for the user; empty if all runs have jobs.

    Raises:
        OSError: the sweep's folder can't be written.
    """
    if all(job_ids(run) for run in runs):
        return ""
    write_json(home.sweep_stop_file, {"time": time.time()})
    return "no further run begins"


def cancel_waiting_tasks(home: RunDirectory, warn: Printer = print_warning) -> str:
    """Cancel the array tasks of a search that aren't over, and describe that; empty if all are.

    Call it before the runs are cancelled, so that no task begins another one.

    Args:
        home: the folder of the sweep.
        warn: gets a line if SLURM is there and doesn't answer.

    Raises:
        HpctrainError: SLURM can't be reached.
    """
    waiting = [job_id for job_id, job in _tasks(home, warn).items() if job.state.is_pending]
    for array in dict.fromkeys(job_id.partition("_")[0] for job_id in waiting):
        Slurm().cancel_pending(array)
    return f"cancelled {counted(len(waiting), 'task')} that had not begun" if waiting else ""


def cancel_idle_tasks(home: RunDirectory, warn: Printer = print_warning, *, runs: Sequence[RunDirectory] = ()) -> str:
    """Cancel the array tasks of a search that run, and train none of these runs; empty if there is none.

    Such a task is between two runs. Call it after the runs are cancelled, whose tasks need time to save.

    Args:
        home: the folder of the sweep.
        warn: gets a line if SLURM is there and doesn't answer.
        runs: of the sweep.

    Raises:
        HpctrainError: SLURM can't be reached.
    """
    busy = {job_id for run in runs for job_id in job_ids(run)}
    idle = [job_id for job_id, job in _tasks(home, warn).items() if job.state.is_running and job_id not in busy]
    for error in Slurm().cancel_all(idle).values():
        raise error
    return f"cancelled {counted(len(idle), 'task')} between two runs" if idle else ""


def _tasks(home: RunDirectory, warn: Printer) -> dict[str, SlurmJob]:
    """SLURM's records of the tasks of a search that it knows."""
    jobs = ask_slurm(job_ids(home), warn)
    if jobs is None:
        raise HpctrainError("SLURM can't be reached from here to cancel its tasks; run the command on a login node")
    return {job_id: job for job_id, job in jobs.items() if job is not None}
