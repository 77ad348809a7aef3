"""Searches: sixteen processes that ask at once and are killed at random, and whole ones on this machine."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
import traceback
from collections import Counter
from pathlib import Path

import pytest

from hpctrain.cli import main as hpctrain
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason
from hpctrain.search.algorithm import promotable
from hpctrain.search.journal import JournalEvent, read_journal
from tests.support.searching import asha, prepared, train

PROCESSES = 16


def work(home, tasks: list[int]) -> None:
    """Ask as array tasks do, one after another; a process that replaces a killed one finds what that had done."""
    search = asha(home)
    for task in tasks:
        while (begin := search.ask(f"7_{task}")) is not None:
            train(search, begin, (begin.run * 7919) % 1000 / 1000)


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
    begun = Counter((one.run, one.rung) for one in decisions if one.event is JournalEvent.BEGIN)
    ended = Counter((one.run, one.rung) for one in decisions if one.event is JournalEvent.END)
    assert begun == ended
    assert set(begun.values()) == {1}
    assert {run for run, _ in begun} == set(range(num_runs))
    search = asha(home)
    for run in range(num_runs):
        attempts = Ledger(search.directory(run)).attempts()
        paused = [attempt.end_step for attempt in attempts if attempt.reason in (Reason.PAUSED, Reason.COMPLETED)]
        assert paused == [10 * 3**rung for rung in range(sum(one == run for one, _ in ended))]
    # whoever belongs to the best third of a rung in the end has passed the next one, too
    assert promotable([one for one in decisions if one.event is JournalEvent.END], begun, reduction_factor=3) == []


def test_a_search_on_this_machine_ends_and_is_extended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["trainer.max_steps=4", "trainer.max_epochs=null", "trainer.eval_every_steps=1", "logger.tensorboard=false"]
    search = ["sweep=asha", "sweep.min_steps=1", "sweep.num_runs=2", "optimizer.lr=interval(1e-3,1e-2)"]
    assert hpctrain(["-m", *words, *search, "run_dir=S"]) == 0
    assert hpctrain(["resume", "S", "sweep.num_runs=3"]) == 0
    out, err = capfd.readouterr()
    heads = [line.partition(": ")[0] for line in out.splitlines() if re.match(r"run \d", line)]
    assert heads[:4] == [
        "run 0 begins, to step 1",
        "run 0 paused at step 1",
        "run 1 begins, to step 1",
        "run 1 paused at step 1",
    ]
    best = heads[4].split()[1]
    assert heads[4:8] == [
        f"run {best} continues, to step 3",
        f"run {best} paused at step 3",
        f"run {best} continues, to its end",
        f"run {best} completed at step 4",
    ]
    assert re.search(rf"^run {best} completed at step 4: eval/accuracy 0\.\d+$", out, re.MULTILINE)
    # the search continues paused runs: nobody else has to
    assert not re.search("to resume|pause_at_step=. instead", out + err)
    assert hpctrain(["resume", "S"]) == 0
    assert "the search is complete" in capfd.readouterr().out
    assert hpctrain(["status", "S", "--json"]) == 0
    runs = {Path(run["path"]).name: run for run in json.loads(capfd.readouterr().out)}
    # the second command finds a third run, and one in three continues, unless it has completed already
    assert {run["state"] for run in runs.values()} == {"completed", "paused"}
    ends = [
        (one.run, one.rung) for one in read_journal(RunDirectory.at(tmp_path / "S")) if one.event is JournalEvent.END
    ]
    assert len(ends) == len(set(ends))
    assert {run for run, _ in ends} == {0, 1, 2}


@pytest.mark.nightly
def test_a_sweep_that_optuna_chooses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["trainer.max_steps=1", "trainer.max_epochs=null", "logger.tensorboard=false"]
    search = ["sweep=optuna", "sweep.num_runs=5", "sweep.startup_runs=2", "optimizer.lr=tag(log,interval(1e-4,1e-1))"]
    assert hpctrain(["-m", *words, *search, "optimizer=adamw,sgd", "run_dir=S"]) == 0
    assert hpctrain(["resume", "S", "sweep.num_runs=6"]) == 0
    decisions = read_journal(RunDirectory.at(tmp_path / "S"))
    assert [one.run for one in decisions if one.event is JournalEvent.END] == list(range(6))
    assert {one.reason for one in decisions if one.event is JournalEvent.END} == {"completed"}
