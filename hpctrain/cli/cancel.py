"""`python -m hpctrain cancel RUN ...`: cancel queued and running runs."""

from __future__ import annotations

import os
import sys

from hpctrain.cli.arguments import add_runs, chosen_runs, command_parser
from hpctrain.errors import ERROR_PREFIX, ExitCode, HpctrainError
from hpctrain.files import describe_os_error
from hpctrain.launch.cancellation import cancel

_EPILOG = """\
examples:
  python -m hpctrain cancel runs/digits/2026-01-31_12-00-00
  python -m hpctrain cancel sweep          # every run under runs/sweep

A queued run leaves the queue. A running run finishes its current step, saves if the time allows, and is never
requeued; `resume` continues it. In a job array, only the tasks of these runs are cancelled. A run on this machine
receives the signal that Ctrl-C sends.

Exit code 0; 1 if a queued or running run could not be cancelled; 2 if RUN is not a run."""


def main(arguments: list[str]) -> int:
    """Cancel runs; ``arguments`` are those after `cancel`."""
    description = "Cancel the queued and running jobs of runs; stop runs that were started on this machine."
    parser = command_parser("cancel", description, _EPILOG)
    add_runs(parser, nargs="+")
    options = parser.parse_args(arguments)
    failed = False
    # all runs are found first: a misspelt name must not leave half of them cancelled
    for directory in chosen_runs(options):
        try:
            done = cancel(directory)
        except (HpctrainError, OSError) as error:
            failed = True
            why = describe_os_error(error) if isinstance(error, OSError) else error
            print(f"{ERROR_PREFIX}{os.path.relpath(directory.path)}: {why}", file=sys.stderr)
        else:
            print(f"{os.path.relpath(directory.path)}: {done}")
    return ExitCode.FAILED if failed else ExitCode.FINISHED
