"""Cancel the queued and running jobs of runs; stop runs that were started on this machine.

examples:
  python -m hpctrain cancel runs/digits/2026-01-31_12-00-00
  python -m hpctrain cancel sweep          # every run under runs/sweep

A queued run leaves the queue. A running run finishes its current step, saves if the time allows, and is never
requeued; `resume` continues it. In a job array, only the tasks of these runs are cancelled. The tasks of a search that
wait are cancelled first, so that no further run begins; so is a sweep on one machine if SWEEP itself is named. A run
outside of SLURM, on this or another machine, is asked to stop by a file in its run directory.

Exit code 0; 1 if a queued or running run could not be cancelled; 2 if RUN is not a run.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hpctrain.cli.arguments import add_runs, chosen_runs, command_parser
from hpctrain.errors import ERROR_PREFIX, ExitCode, HpctrainError
from hpctrain.files import describe_os_error, write_json
from hpctrain.launch.cancellation import cancel_all
from hpctrain.phrases import counted
from hpctrain.run.directory import RunDirectory
from hpctrain.scheduler.job import SlurmJob
from hpctrain.scheduler.slurm import Slurm
from hpctrain.status.jobs import job_ids, query_jobs


def main(arguments: list[str]) -> int:
    """Cancel runs; ``arguments`` are those after `cancel`."""
    parser = command_parser("cancel", __doc__)
    add_runs(parser, nargs="+")
    options = parser.parse_args(arguments)
    # all are found first: a misspelt name must not leave half of them cancelled
    sweeps, runs = _sweeps(options), chosen_runs(options)
    searches = [home for home in sweeps if home.jobs.is_file()]
    # before the runs: neither a process that trains them in turn nor a task that waits may begin another one meanwhile
    succeeded = [_run_and_print(home, lambda home: _stop_process(home, runs)) for home in sweeps]
    succeeded += [_run_and_print(home, _cancel_waiting_tasks) for home in searches]
    runs = chosen_runs(options) if searches else runs
    succeeded += [_print_result(run, done_or_error) for run, done_or_error in zip(runs, cancel_all(runs), strict=True)]
    # and last those that run, and were between two runs
    succeeded += [_run_and_print(home, lambda home: _cancel_idle_tasks(home, runs)) for home in searches]
    return ExitCode.FINISHED if all(succeeded) else ExitCode.FAILED


def _sweeps(options: argparse.Namespace) -> list[RunDirectory]:
    """The folders of sweeps that are named, by a path or by a name in the folder that contains the runs."""
    folders = [[RunDirectory.at(Path(name)), RunDirectory.at(Path(options.runs_dir, name))] for name in options.run]
    return [sweeps[0] for pair in folders if (sweeps := [home for home in pair if home.sweep.is_file()])]


def _stop_process(home: RunDirectory, runs: Sequence[RunDirectory]) -> str:
    """Keep the process that trains a sweep on one machine from beginning another run.

    The next launch or resume of the sweep removes the file that this writes.
    """
    if all(job_ids(run) for run in runs):
        return ""
    with home.permissions():
        write_json(home.sweep_stop_file, {"time": time.time()})
    return "no further run begins"


def _cancel_waiting_tasks(home: RunDirectory) -> str:
    """Cancel the array tasks of a search that wait in the queue."""
    waiting = [job_id for job_id, job in _tasks(home).items() if job.state.is_pending]
    for array in dict.fromkeys(job_id.partition("_")[0] for job_id in waiting):
        Slurm().cancel_pending(array)
    return f"cancelled {counted(len(waiting), 'task')} that had not begun" if waiting else ""


def _cancel_idle_tasks(home: RunDirectory, runs: Sequence[RunDirectory]) -> str:
    """Cancel the array tasks of a search that run, and are between two runs; the others need time to save."""
    busy = {job_id for run in runs for job_id in job_ids(run)}
    idle = [job_id for job_id, job in _tasks(home).items() if job.state.is_running and job_id not in busy]
    for error in Slurm().cancel_all(idle).values():
        raise error
    return f"cancelled {counted(len(idle), 'task')} between two runs" if idle else ""


def _tasks(home: RunDirectory) -> dict[str, SlurmJob]:
    """SLURM's records of the tasks of a search that it knows."""
    jobs = query_jobs(job_ids(home))
    if jobs is None:
        raise HpctrainError("SLURM can't be reached from here to cancel its tasks; run the command on a login node")
    return {job_id: job for job_id, job in jobs.items() if job is not None}


def _run_and_print(directory: RunDirectory, act: Callable[[RunDirectory], str]) -> bool:
    try:
        outcome: str | HpctrainError | OSError = act(directory)
    except (HpctrainError, OSError) as error:
        outcome = error
    return _print_result(directory, outcome)


def _print_result(directory: RunDirectory, outcome: str | HpctrainError | OSError) -> bool:
    """Print what was done, or the error; return whether there was none."""
    if isinstance(outcome, Exception):
        why = describe_os_error(outcome) if isinstance(outcome, OSError) else outcome
        print(f"{ERROR_PREFIX}{os.path.relpath(directory.path)}: {why}", file=sys.stderr)
        return False
    if outcome:
        print(f"{os.path.relpath(directory.path)}: {outcome}")
    return True
