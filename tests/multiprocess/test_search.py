"""Sixteen processes that ask for runs of one search at once, and are killed at random."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

import pytest

from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason
from hpctrain.search.journal import Event, read_journal
from hpctrain.search.promotion import promotable

sys.path.append(str(Path(__file__).parents[1] / "unit" / "search"))
from searching import asha, prepared, train

PROCESSES = 16


def work(home, tasks: list[int]) -> None:
    """Ask as array tasks do, one after another; a process that replaces a killed one finds what that had done."""
    search = asha(home)
    for task in tasks:
        while (assignment := search.ask(f"7_{task}")) is not None:
            train(search, assignment, (assignment.run * 7919) % 1000 / 1000)


def fork(home, tasks: list[int]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work(home, tasks)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("num_runs", "num_kills"), [(48, 24), pytest.param(1000, 300, marks=pytest.mark.nightly)])
def test_no_run_is_lost_and_none_is_trained_twice(tmp_path: Path, num_runs: int, num_kills: int) -> None:
    home = prepared(tmp_path, num_runs)
    chance = random.Random(os.environ.get("HPCTRAIN_SOAK_SEED", "1"))
    tasks = [list(range(first, num_runs, PROCESSES)) for first in range(PROCESSES)]
    running = {fork(home, own): own for own in tasks}
    kills = 0
    while running:
        if kills < num_kills:
            time.sleep(chance.uniform(0.01, 0.05))
            victim = chance.choice(list(running))
            os.kill(victim, signal.SIGKILL)
            kills += 1
        pid, status = os.waitpid(-1, 0 if kills >= num_kills else os.WNOHANG)
        if pid:
            own = running.pop(pid)
            code = os.waitstatus_to_exitcode(status)
            assert code in (0, -signal.SIGKILL)
            if code:
                running[fork(home, own)] = own
    # the tasks that were killed before the last end was recorded, as `resume` continues them
    work(home, list(range(num_runs, num_runs + PROCESSES)))

    decisions = read_journal(home)
    assert len(decisions) == len(list((home.path / "search").glob("[0-9]*.json")))
    begun = Counter((one.run, one.rung) for one in decisions if one.event is Event.BEGIN)
    ended = Counter((one.run, one.rung) for one in decisions if one.event is Event.END)
    assert begun == ended
    assert set(begun.values()) == {1}
    assert {run for run, _ in begun} == set(range(num_runs))
    search = asha(home)
    for run in range(num_runs):
        attempts = Ledger(search.directory(run)).attempts()
        paused = [attempt.end_step for attempt in attempts if attempt.reason in (Reason.PAUSED, Reason.COMPLETED)]
        assert paused == [10 * 3**rung for rung in range(sum(one == run for one, _ in ended))]
    # whoever belongs to the best third of a rung in the end has passed the next one, too
    assert promotable([one for one in decisions if one.event is Event.END], begun, reduction_factor=3) == []
