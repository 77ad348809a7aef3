"""Print what a rank of a run printed, over all attempts.

examples:
  python -m hpctrain logs digits                    # rank zero of the one run under runs/digits
  python -m hpctrain logs digits --follow           # until the run ends, over all its attempts
  python -m hpctrain logs digits --rank 3 --lines 50

Until a rank has printed something, the log of the batch script is shown, or the state of the run if there is none.

Exit code 0; 2 if RUN is not a run, or has no such rank.
"""

from __future__ import annotations

import sys

from hpctrain.cli import end_echoed_line
from hpctrain.cli.arguments import add_runs, chosen_run, command_parser
from hpctrain.errors import ExitCode, RunDirectoryError
from hpctrain.phrases import numbered
from hpctrain.run.directory import RunDirectory
from hpctrain.status.follow import Follower, RunLog
from hpctrain.status.run_status import read_statuses
from hpctrain.terminal import log_output


def main(arguments: list[str]) -> int:
    """Print a log; ``arguments`` are those after `logs`."""
    parser = command_parser("logs", __doc__)
    add_runs(parser)
    parser.add_argument("--follow", "-f", action="store_true", help="keep printing until the run ends")
    parser.add_argument("--rank", type=int, metavar="N", help="the rank to show (default: 0)")
    parser.add_argument("--lines", "-n", type=int, metavar="N", help="begin with the last N lines")
    options = parser.parse_args(arguments)
    if (options.lines or 0) < 0 or (options.rank or 0) < 0:
        parser.error("--lines and --rank can't be negative")
    directory = chosen_run(options)
    log = RunLog(directory, options.rank, log_output(sys.stdout), last_lines=options.lines)
    try:
        if options.follow:
            status = Follower(log, sys.stderr).follow()
            _print_message(f"the run is {status.described}{status.at_step}")
        elif not log.copy():
            _explain_silence(directory, log)
    except KeyboardInterrupt:  # the usual way to stop following
        end_echoed_line()
    finally:
        log.end()
    return ExitCode.FINISHED


def _explain_silence(directory: RunDirectory, log: RunLog) -> None:
    ranks = directory.ranks_with(directory.rank_log("*"))
    if log.rank is None or not ranks:
        (status,) = read_statuses([directory])
        _print_message(f"nothing was printed yet: the run is {status.described}")
    # srun creates the logs of all ranks when it starts them
    elif log.rank in ranks:
        _print_message(f"rank {log.rank} has printed nothing")
    else:
        raise RunDirectoryError(f"--rank {log.rank}: this rank has no log; there are logs of {numbered('rank', ranks)}")


def _print_message(text: str) -> None:
    # standard output carries the log alone, so that it can be piped
    sys.stdout.flush()
    print(f"hpctrain: {text}", file=sys.stderr, flush=True)
