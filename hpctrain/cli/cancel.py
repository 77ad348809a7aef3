"""`python -m hpctrain cancel RUN ...`: cancel queued and running runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from hpctrain.cli.arguments import add_runs, chosen_runs, command_parser
from hpctrain.errors import ERROR_PREFIX, ExitCode, HpctrainError
from hpctrain.files import describe_os_error
from hpctrain.launch.cancellation import cancel_all
from hpctrain.run.directory import RunDirectory
from hpctrain.sweep.cancel_search import (
    cancel_idle_tasks,
    cancel_on_machine,
    cancel_waiting_tasks,
    search_home,
    sweep_home,
)

_EPILOG = """\
examples:
  python -m hpctrain cancel runs/digits/2026-01-31_12-00-00
  python -m hpctrain cancel sweep          # every run under runs/sweep

A queued run leaves the queue. A running run finishes its current step, saves if the time allows, and is never
requeued; `resume` continues it. In a job array, only the tasks of these runs are cancelled. The tasks of a search that
wait are cancelled first, so that no further run begins; so is a sweep on one machine if SWEEP itself is named. A run
outside of SLURM, on this or another machine, is asked to stop by a file in its run directory.

Exit code 0; 1 if a queued or running run could not be cancelled; 2 if RUN is not a run."""


def main(arguments: list[str]) -> int:
    """Cancel runs; ``arguments`` are those after `cancel`."""
    description = "Cancel the queued and running jobs of runs; stop runs that were started on this machine."
    parser = command_parser("cancel", description, _EPILOG)
    add_runs(parser, nargs="+")
    options = parser.parse_args(arguments)
    # all are found first: a misspelt name must not leave half of them cancelled
    homes, runs = _homes(options, search_home), chosen_runs(options)
    # before the runs: neither a process that trains them in turn nor a task that waits may begin another one meanwhile
    done = [_cancelled(home, partial(cancel_on_machine, runs=runs)) for home in _homes(options, sweep_home)]
    done += [_cancelled(home, cancel_waiting_tasks) for home in homes]
    runs = chosen_runs(options) if homes else runs
    done += [_shown(run, done_or_error) for run, done_or_error in zip(runs, cancel_all(runs), strict=True)]
    # and last those that run, and were between two runs
    done += [_cancelled(home, partial(cancel_idle_tasks, runs=runs)) for home in homes]
    return ExitCode.FINISHED if all(done) else ExitCode.FAILED


def _homes(options: argparse.Namespace, find: Callable[[str, Path], RunDirectory | None]) -> list[RunDirectory]:
    found = (find(typed, Path(options.runs_dir)) for typed in options.run)
    return [home for home in found if home is not None]


def _cancelled(directory: RunDirectory, act: Callable[[RunDirectory], str]) -> bool:
    try:
        done: str | HpctrainError | OSError = act(directory)
    except (HpctrainError, OSError) as error:
        done = error
    return _shown(directory, done)


def _shown(directory: RunDirectory, done: str | HpctrainError | OSError) -> bool:
    """Print what was done, or the error; return whether there was none."""
    if isinstance(done, Exception):
        why = describe_os_error(done) if isinstance(done, OSError) else done
        print(f"{ERROR_PREFIX}{os.path.relpath(directory.path)}: {why}", file=sys.stderr)
        return False
    if done:
        print(f"{os.path.relpath(directory.path)}: {done}")
    return True
