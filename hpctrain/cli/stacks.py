"""Print the Python stacks of every thread of a running run's ranks, without interrupting it.

examples:
  python -m hpctrain stacks digits              # every rank of the one run under runs/digits
  python -m hpctrain stacks digits --rank 3
  python -m hpctrain stacks digits --wait 90    # for a file system that shows new files to other nodes after a minute

The request is a file in the run directory; the run isn't interrupted. Each rank looks for it every two seconds, and
answers in logs/stacks_ATTEMPT_RANK.txt, which stays there. The main thread is the one that trains.

Exit code 0; 1 if a rank did not answer in time; 2 if RUN is not a run, or isn't running.
"""

from __future__ import annotations

import os
import sys
import time

from hpctrain.cli.arguments import add_runs, chosen_run, command_parser
from hpctrain.errors import ExitCode, RunDirectoryError
from hpctrain.phrases import counted, listed, numbered
from hpctrain.run.directory import RunDirectory
from hpctrain.run.exit_record import read_exit_records
from hpctrain.run.ledger import Ledger
from hpctrain.run.stacks import answer, request_stacks
from hpctrain.status.run_status import read_statuses
from hpctrain.status.state import RunState

LOOK_S = 0.2
"""Seconds between two reads of the answers."""


def main(arguments: list[str]) -> int:
    """Request stacks and print them; ``arguments`` are those after `stacks`."""
    parser = command_parser("stacks", __doc__)
    add_runs(parser)
    parser.add_argument("--rank", type=int, metavar="N", help="show only this rank")
    meaning = "seconds to wait for answers (default: 10)"
    parser.add_argument("--wait", type=float, default=10.0, metavar="S", help=meaning)
    options = parser.parse_args(arguments)
    if (options.rank or 0) < 0 or not options.wait >= 0:
        parser.error("--rank and --wait must be 0 or more")
    directory = chosen_run(options)
    attempt = _running_attempt(directory)
    with directory.permissions():
        token = request_stacks(directory.stacks_request(attempt))
    answers, missing = _collect(directory, attempt, token, options.rank, options.wait)
    for _, text in sorted(answers.items()):
        print(text)
    if missing or not answers:
        print(f"hpctrain: {_no_answer(missing, options.wait)}", file=sys.stderr)
        return ExitCode.FAILED
    return ExitCode.FINISHED


def _running_attempt(directory: RunDirectory) -> int:
    attempt = Ledger(directory).last_claim()
    (status,) = read_statuses([directory])
    # a run whose state can't be determined here may be running
    if attempt and status.state in (RunState.STARTING, RunState.RUNNING, RunState.UNKNOWN):
        return attempt
    stack_files = sorted(os.path.relpath(path) for path in directory.logs.glob("stacks_*.txt"))
    earlier = f"; earlier stacks: {listed(stack_files)}" if stack_files else ""
    raise RunDirectoryError(
        f"{os.path.relpath(directory.path)} is {status.state}, and only a running run has stacks to show{earlier}"
    )


def _collect(
    directory: RunDirectory, attempt: int, token: str, only_rank: int | None, wait_s: float
) -> tuple[dict[int, str], list[int]]:
    """Wait for answers; return them by rank, and the ranks that didn't answer in time."""
    answers: dict[int, str] = {}
    deadline = time.monotonic() + wait_s
    while True:
        expected = _expected(directory, attempt, only_rank)
        for rank in directory.ranks_with(directory.stacks(attempt, "*")) if expected is None else expected:
            if rank not in answers and (text := answer(directory.stacks(attempt, rank), token)) is not None:
                answers[rank] = text
        missing = sorted((expected or set()) - answers.keys())
        if (expected is not None and not missing) or time.monotonic() >= deadline:
            return answers, missing
        time.sleep(LOOK_S)


def _expected(directory: RunDirectory, attempt: int, only_rank: int | None) -> set[int] | None:
    """The ranks that still run; None until the attempt has recorded its world size."""
    world_size = Ledger(directory).attempt(attempt).world_size
    if world_size is None:
        return None if only_rank is None else {only_rank}
    if only_rank is not None and only_rank >= world_size:
        raise RunDirectoryError(f"--rank {only_rank}: the run has {counted(world_size, 'rank')}, counted from 0")
    # a rank that has ended can't answer
    ranks = set(range(world_size)) if only_rank is None else {only_rank}
    return ranks - read_exit_records(directory.attempt(attempt)).keys()


def _no_answer(missing: list[int], wait_s: float) -> str:
    if not missing:
        return f"no rank answered within {wait_s:g} s: the run is just starting, or has just ended; try again"
    return (
        f"{numbered('rank', missing)} did not answer within {wait_s:g} s: the process is stopped, its node is down, it "
        "is in a call that blocks every other thread, or its file system is slow to show new files (see --wait)"
    )
