"""`python -m hpctrain stacks RUN`: where the ranks of a running run stand, at this moment."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from hpctrain.cli.status import read_statuses
from hpctrain.errors import ExitCode, RunDirectoryError
from hpctrain.run.directory import RunDirectory
from hpctrain.run.exit_record import read_exit_records
from hpctrain.run.ledger import Ledger
from hpctrain.run.stacks import answer, request_stacks
from hpctrain.status.search import run_of
from hpctrain.status.state import RunState

LOOK_S = 0.2
"""Seconds between two looks at the answers."""
SHOWN = 8
"""Ranks that are named before the rest is left to dots."""

_EPILOG = """\
examples:
  python -m hpctrain stacks digits              # the Python stacks of all ranks of the run under runs/digits
  python -m hpctrain stacks digits --rank 3
  python -m hpctrain stacks digits --wait 90    # a file system that shows new files to other nodes after a minute

The request is a file in the run directory; the run goes on. Each rank answers within about two seconds, once it sees
the file, into logs/stacks_ATTEMPT_RANK.txt, where the answers stay. The main thread is the one that trains.

Exit code 0; 1 where a rank did not answer in time; 2 where RUN is none, or isn't running."""


def main(arguments: list[str]) -> int:
    """Ask for stacks and show them; `arguments` are those after the word `stacks`."""
    parser = argparse.ArgumentParser(
        prog="python -m hpctrain stacks",
        description="Show the Python stacks of all threads of a running run's ranks, without disturbing it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN", help="a run directory, or its name under the folder of runs")
    parser.add_argument("--rank", type=int, metavar="N", help="of one rank only")
    parser.add_argument("--wait", type=float, default=10.0, metavar="S", help="seconds to wait for answers (10)")
    parser.add_argument("--runs-dir", default="runs", metavar="FOLDER", help="where names are looked up (runs)")
    options = parser.parse_args(arguments)
    if (options.rank or 0) < 0 or options.wait < 0:
        parser.error("--rank and --wait can't be negative")
    directory = run_of(options.run, Path(options.runs_dir))
    attempt = _running_attempt(directory)
    token = request_stacks(directory.stacks_request(attempt))
    answers, missing = _collect(directory, attempt, token, options.rank, options.wait)
    for _, text in sorted(answers.items()):
        print(text)
    if missing or not answers:
        print(f"hpctrain: {_silence(missing, options.wait)}", file=sys.stderr)
        return ExitCode.FAILED
    return ExitCode.FINISHED


def _running_attempt(directory: RunDirectory) -> int:
    attempt = Ledger(directory).last_claim()
    (status,) = read_statuses([directory])
    # what can't be seen from here may be running all the same
    if attempt and status.state in (RunState.STARTING, RunState.RUNNING, RunState.UNKNOWN):
        return attempt
    written = sorted(os.path.relpath(path) for path in directory.logs.glob("stacks_*.txt"))
    earlier = f"; stacks from before: {', '.join(written[:SHOWN])}" if written else ""
    raise RunDirectoryError(
        f"{os.path.relpath(directory.path)}: the run is {status.state}, and only a running one can be asked{earlier}"
    )


def _collect(
    directory: RunDirectory, attempt: int, token: str, only: int | None, wait_s: float
) -> tuple[dict[int, str], list[int]]:
    """The answers by rank, and the ranks that owe one after so many seconds."""
    answers: dict[int, str] = {}
    deadline = time.monotonic() + wait_s
    while True:
        expected = _expected(directory, attempt, only)
        for rank in _possible(directory, attempt) if expected is None else expected:
            if rank not in answers and (text := answer(directory.stacks(attempt, rank), token)) is not None:
                answers[rank] = text
        missing = sorted((expected or set()) - answers.keys())
        if (expected is not None and not missing) or time.monotonic() >= deadline:
            return answers, missing
        time.sleep(LOOK_S)


def _expected(directory: RunDirectory, attempt: int, only: int | None) -> set[int] | None:
    """The ranks that still run; None as long as the attempt's start doesn't tell how many there are."""
    entry = next((entry for entry in Ledger(directory).attempts() if entry.attempt == attempt), None)
    world_size = entry.world_size if entry is not None else None
    if world_size is None:
        return None if only is None else {only}
    if only is not None and only >= world_size:
        raise RunDirectoryError(f"--rank {only}: the run has {world_size} ranks, counted from 0")
    ranks = set(range(world_size)) if only is None else {only}
    return ranks - read_exit_records(directory.claim(attempt)).keys()


def _possible(directory: RunDirectory, attempt: int) -> list[int]:
    names = (path.stem.rpartition("_")[2] for path in directory.logs.glob(f"stacks_{attempt}_*.txt"))
    return [int(name) for name in names if name.isdecimal()]


def _silence(missing: list[int], wait_s: float) -> str:
    if not missing:
        return f"no rank answered within {wait_s:g} s; the run has only begun to start, or has just ended: try again"
    shown = ", ".join(map(str, missing[:SHOWN])) + (", ..." if len(missing) > SHOWN else "")
    return (
        f"rank {shown} did not answer within {wait_s:g} s: stopped, its machine gone, in a call that lets no other "
        "thread run, or its file system slow to show new files (--wait)"
    )
