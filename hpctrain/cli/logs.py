"""`python -m hpctrain logs RUN`: what the ranks of a run printed."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import BinaryIO

from hpctrain.cli.jobs import ask
from hpctrain.cli.status import read_statuses
from hpctrain.errors import ExitCode, RunDirectoryError
from hpctrain.run.directory import RunDirectory
from hpctrain.status.report import RunStatus, job_ids, read_status
from hpctrain.status.search import run_of
from hpctrain.status.state import JobView, RunState
from hpctrain.status.tail import Tail

READ_S = 0.2
"""Seconds between two looks at a log and run directory that are followed."""
ASK_S = 10.0
"""Seconds between two questions to the scheduler: many may follow at the same time."""
SETTLE_S = 1.0
"""Seconds for which a run must be over to be believed."""

_EPILOG = """\
examples:
  python -m hpctrain logs digits                    # the one run under runs/digits, rank zero
  python -m hpctrain logs digits --follow           # to the end of the run, over all its attempts
  python -m hpctrain logs digits --rank 3 --lines 50

Before a rank has printed anything, the log of the batch script is shown, or the reason why there is none.

Exit code 0; 2 where RUN is none, or has no such rank."""


def main(arguments: list[str]) -> int:
    """Show a log; `arguments` are those after the word `logs`."""
    parser = argparse.ArgumentParser(
        prog="python -m hpctrain logs",
        description="Show what a rank of a run printed, over all attempts.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN", help="a run directory, or its name under the folder of runs")
    parser.add_argument("--follow", "-f", action="store_true", help="go on until the run ends")
    parser.add_argument("--rank", type=int, metavar="N", help="of which rank (0)")
    parser.add_argument("--lines", "-n", type=int, metavar="N", help="only the last N lines of what is there")
    parser.add_argument("--runs-dir", default="runs", metavar="FOLDER", help="where names are looked up (runs)")
    options = parser.parse_args(arguments)
    if (options.lines or 0) < 0 or (options.rank or 0) < 0:
        parser.error("--lines and --rank can't be negative")
    directory = run_of(options.run, Path(options.runs_dir))
    # Ctrl-C is how one stops following
    with suppress(KeyboardInterrupt), closing(_Log(directory, options.rank, options.lines, sys.stdout.buffer)) as log:
        if options.follow:
            _follow(log)
        else:
            _show(log)
    return ExitCode.FINISHED


class _Log:
    """What is shown of a run: the rank's log, and the batch script's as long as that isn't there.

    Args:
        directory: the run.
        rank: None is rank zero, or the batch script where rank zero has no log.
        lines: how much of what is there at first; None is all.
        output: where it goes.
    """

    def __init__(self, directory: RunDirectory, rank: int | None, lines: int | None, output: BinaryIO) -> None:
        self.directory, self.rank, self._lines, self._output = directory, rank, lines, output
        self._tail: Tail | None = None

    def copy(self) -> bool:
        """Write out what is new; False where there is no log yet."""
        path = self.path()
        if path is not None and (self._tail is None or self._tail.path != path):
            if self._tail is not None:
                self._copy_rest(self._tail)
                self._tail.close()
            elif path != self._rank_log:
                _say(f"no rank has printed anything yet; this is the batch script's log, {path}")
            self._tail = Tail(path, self._lines)
            self._lines = None
        if self._tail is not None:
            self._copy_rest(self._tail)
        return self._tail is not None

    def close(self) -> None:
        """Release the log."""
        if self._tail is not None:
            self._tail.close()

    def path(self) -> Path | None:
        """The log that there is to show; srun makes those of the ranks long before anything is in them."""
        paths = [self._rank_log]
        if self.rank is None:
            paths += [
                Path(str(record["log"])) for record in reversed(self.directory.job_records()) if record.get("log")
            ]
        return next((path for path in paths if path.exists() and path.stat().st_size), None)

    def ranks(self) -> list[int]:
        """The ranks that have a log."""
        names = (path.stem.partition("_")[2] for path in self.directory.logs.glob("rank_*.log"))
        return sorted(int(name) for name in names if name.isdecimal())

    @property
    def _rank_log(self) -> Path:
        return self.directory.rank_log(self.rank or 0)

    def _copy_rest(self, tail: Tail) -> None:
        while data := tail.read():
            self._output.write(data)
        self._output.flush()


def _show(log: _Log) -> None:
    if log.copy():
        return
    (status,) = read_statuses([log.directory])
    if log.rank is not None and (ranks := log.ranks()):
        shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
        if log.rank in ranks:
            _say(f"rank {log.rank} has printed nothing")
            return
        raise RunDirectoryError(f"--rank {log.rank}: there is no log of this rank; there are logs of rank {shown}")
    _say(f"nothing was printed yet: the run is {_described(status)}")


def _follow(log: _Log) -> None:
    """Copy until the run has been over for a second: between two attempts it may look so for a moment."""
    watch, described, over_since = _Watch(log.directory), "", None
    while True:
        shown = log.copy()
        status, now = watch.look(), time.monotonic()
        # what can't be seen from here may still go on
        over = not status.state.may_change and status.state is not RunState.UNKNOWN
        if not over:
            over_since = None
        elif over_since is None:
            over_since = now
            watch.ask_again()
        elif now - over_since >= SETTLE_S:
            log.copy()
            _say(f"the run is {_described(status)}, at step {status.step}")
            return
        if not over and _described(status) != described and (not shown or status.state is RunState.QUEUED):
            described = _described(status)
            _say(f"the run is {described}")
        time.sleep(READ_S)


class _Watch:
    """The status of a run, looked at often in its directory and now and then at the scheduler."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._jobs: Mapping[str, JobView | None] | None = None
        self._asked: tuple[float, list[str]] | None = None

    def look(self) -> RunStatus:
        """The status now."""
        now, ids = time.monotonic(), job_ids(self._directory)
        if self._asked is None or now - self._asked[0] >= ASK_S or ids != self._asked[1]:
            self._jobs = ask(ids)
            self._asked = (now, ids)
        return read_status(self._directory, self._jobs)

    def ask_again(self) -> None:
        """Ask the scheduler at the next look, whatever was heard before."""
        self._asked = None


def _described(status: RunStatus) -> str:
    return f"{status.state} ({status.note})" if status.note else str(status.state)


def _say(text: str) -> None:
    """To the person, not into what is piped on."""
    sys.stdout.flush()
    print(f"hpctrain: {text}", file=sys.stderr, flush=True)
