"""Searches on a real SLURM: tasks ask for runs, are preempted, killed and cancelled, and every run is accounted for."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from hpctrain.run.code import current_code
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason
from hpctrain.search.algorithm import promotable
from hpctrain.search.journal import JournalEvent, SearchDecision, read_journal

if TYPE_CHECKING:
    from tests.slurm.conftest import SlurmSandbox

    Hpctrain = Callable[..., subprocess.CompletedProcess[str]]

SEED = os.environ.get("HPCTRAIN_SOAK_SEED", "1")
QUICK = [
    *("cluster=slurm", "logger.tensorboard=false", "cluster.cpus_per_process=1", "data.num_workers=0"),
    *("trainer.max_epochs=null", "trainer.eval_every_steps=5"),
]
PATIENT = ["cluster.requeue.max_failures=100", "cluster.requeue.max_stalled_attempts=100"]
"""For runs that are killed more often than any real one."""
SPACE = "optimizer.lr=tag(log,interval(1e-4,1e-1))"


@pytest.fixture
def hpctrain(sandbox: SlurmSandbox, tmp_path: Path) -> Hpctrain:
    """Type `python -m hpctrain ...` and wait for it."""

    (tmp_path / "own.py").write_text("")  # what is copied

    def type_command(*words: str) -> subprocess.CompletedProcess[str]:
        done = sandbox.run([sys.executable, "-m", "hpctrain", *words], cwd=tmp_path, timeout=280)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    return type_command


def tasks(sandbox: SlurmSandbox) -> dict[str, str]:
    """The states of the tasks that wait or run, by their ids."""
    printed = sandbox.ask("squeue", "--noheader", "--array", "--partition=low", "--format=%i %T")
    return dict(line.split() for line in printed.splitlines())


def until_no_task(sandbox: SlurmSandbox, strike: Callable[[], None] = lambda: None, timeout: float = 900) -> None:
    deadline = time.monotonic() + timeout
    while left := tasks(sandbox):
        assert time.monotonic() < deadline, left
        strike()
        time.sleep(0.5)


def ends(home: Path) -> dict[tuple[int, int], SearchDecision]:
    """By run and rung; each was passed once, and what was begun has ended."""
    journal = read_journal(RunDirectory.at(home))
    ended = Counter((one.run, one.rung) for one in journal if one.event is JournalEvent.END)
    assert set(ended.values()) == {1}
    assert {(one.run, one.rung) for one in journal if one.event is JournalEvent.BEGIN} == set(ended)
    return {(one.run, one.rung): one for one in journal if one.event is JournalEvent.END}


def require_accounted(home: Path, num_runs: int, *, max_steps: int, rungs: list[int]) -> None:
    """Every run has passed the first rung, the best went on, and no steps were trained twice for good."""
    found = ends(home)
    assert {run for run, _ in found} == set(range(num_runs))
    assert promotable(found.values(), set(found), reduction_factor=3) == []
    for run in range(num_runs):
        attempts = Ledger(RunDirectory.at(home / str(run))).attempts()
        assert all(attempt.reason is not None for attempt in attempts)
        over = [attempt.end_step for attempt in attempts if attempt.reason in (Reason.PAUSED, Reason.COMPLETED)]
        assert over == [*rungs, max_steps][: len(over)], (run, over)
        assert len(over) == sum(one == run for one, _ in found)
        logged = [json.loads(line) for line in (home / str(run) / "metrics.jsonl").read_text().splitlines()]
        evaluated = [record["step"] for record in logged if "eval/accuracy" in record]
        assert evaluated == list(range(5, over[-1] + 1, 5)), (run, evaluated)


@pytest.mark.nightly
def test_a_small_search_of_asha(sandbox: SlurmSandbox, hpctrain: Hpctrain, tmp_path: Path) -> None:
    done = hpctrain(
        "-m", *QUICK, "sweep=asha", "sweep.min_steps=5", "sweep.num_runs=6", "trainer.max_steps=20", SPACE, "run_dir=S"
    )
    assert "with 6 tasks; each takes the next run of the search when it starts" in done.stdout
    until_no_task(sandbox)
    require_accounted(tmp_path / "S", 6, max_steps=20, rungs=[5, 15])
    states = {run["path"].rpartition("/")[2]: run for run in json.loads(hpctrain("status", "S", "--json").stdout)}
    assert {run["state"] for run in states.values()} <= {"paused", "completed"}
    config = yaml.safe_load((tmp_path / "S" / "0" / "config.yaml").read_text())
    assert config["trainer"]["pause_at_step"] in (5, 15, 45)
    # extended: the added runs alone begin, with the code of the others, and whoever is among the best now goes on
    (tmp_path / "own.py").write_text("changed = True")
    done = hpctrain("resume", "S", "sweep.num_runs=9")
    assert "with 3 tasks" in done.stdout, done.stdout
    until_no_task(sandbox)
    require_accounted(tmp_path / "S", 9, max_steps=20, rungs=[5, 15])
    codes = {current_code(RunDirectory.at(tmp_path / "S" / str(run))).digest for run in range(9)}
    assert len(codes) == 1
    assert "the search is complete" in hpctrain("resume", "S").stdout


@pytest.mark.nightly
def test_a_cancelled_search_begins_nothing_more_and_resumes(
    sandbox: SlurmSandbox, hpctrain: Hpctrain, tmp_path: Path
) -> None:
    words = ["sweep=asha", "sweep.min_steps=5", "sweep.num_runs=8", "trainer.max_steps=20"]
    hpctrain("-m", *QUICK, *words, SPACE, "run_dir=S", "cluster.max_parallel_runs=2")
    deadline = time.monotonic() + 120
    while not any(one.event is JournalEvent.BEGIN for one in read_journal(RunDirectory.at(tmp_path / "S"))):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    printed = hpctrain("cancel", "S").stdout
    assert "tasks that had not begun" in printed, printed
    until_no_task(sandbox, timeout=120)
    begun = {one.run for one in read_journal(RunDirectory.at(tmp_path / "S")) if one.event is JournalEvent.BEGIN}
    assert len(begun) <= 3
    hpctrain("resume", "S")
    until_no_task(sandbox)
    found = read_journal(RunDirectory.at(tmp_path / "S"))
    passed = {
        (one.run, one.rung) for one in found if one.event is JournalEvent.END and one.reason in ("paused", "completed")
    }
    assert {run for run, _ in passed} == set(range(8))


@pytest.mark.nightly
def test_optuna_draws_as_its_runs_end(sandbox: SlurmSandbox, hpctrain: Hpctrain, tmp_path: Path) -> None:
    words = ["sweep=optuna", "sweep.num_runs=6", "sweep.startup_runs=3", "trainer.max_steps=5"]
    hpctrain("-m", *QUICK, *words, SPACE, "optimizer=adamw,sgd", "run_dir=S", "cluster.max_parallel_runs=3")
    until_no_task(sandbox)
    found = ends(tmp_path / "S")
    assert {run for run, _ in found} == set(range(6))
    assert {end.reason for end in found.values()} == {"completed"}
    begins = {one.run: one for one in read_journal(RunDirectory.at(tmp_path / "S")) if one.event is JournalEvent.BEGIN}
    for run, begin in begins.items():
        config = yaml.safe_load((tmp_path / "S" / str(run) / "config.yaml").read_text())
        assert config["optimizer"]["lr"] == begin.drawn["params"]["optimizer.lr"]
        assert str(config["optimizer"]["_target_"]).lower().endswith(begin.drawn["params"]["optimizer"])
        assert (tmp_path / "S" / str(run) / "code.jsonl").exists()


@pytest.mark.nightly
@pytest.mark.timeout(2400)
def test_forty_runs_that_are_preempted_and_killed(sandbox: SlurmSandbox, hpctrain: Hpctrain, tmp_path: Path) -> None:
    """Tasks are preempted by other jobs and requeued, ranks and whole tasks are killed, one task is cancelled."""
    words = ["sweep=asha", "sweep.min_steps=5", "sweep.num_runs=40", "trainer.max_steps=50"]
    hpctrain("-m", *QUICK, *words, *PATIENT, SPACE, "run_dir=S")
    kinds = {"requeue": 1, "preempt": 1, "rank": 2, "task": 1}
    cancel = (10, lambda task: sandbox.ask("scancel", task))
    strikes = Strikes(sandbox, tmp_path / "S", kinds, pause_s=6, most=24, own=cancel)
    until_no_task(sandbox, strikes.strike, timeout=1500)
    print(strikes)
    for _ in range(3):
        printed = hpctrain("resume", "S").stdout
        until_no_task(sandbox)
        if "the search is complete" in printed:
            break
    else:
        pytest.fail(printed)
    found = read_journal(RunDirectory.at(tmp_path / "S"))
    passed = [
        (one.run, one.rung) for one in found if one.event is JournalEvent.END and one.reason in ("paused", "completed")
    ]
    assert len(passed) == len(set(passed)), "no rung is passed twice"
    assert {run for run, _ in passed} == set(range(40))
    assert not orphans(tmp_path / "S")


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["optimizer.lr=1e-3,1e-2,1e-1", "seed=1,2"], id="grid"),
        pytest.param(["sweep=random", "sweep.num_runs=6", SPACE], id="random"),
    ],
)
def test_the_winner_is_that_of_a_straight_sweep(
    words: list[str], sandbox: SlurmSandbox, hpctrain: Hpctrain, tmp_path: Path
) -> None:
    """Runs are preempted, requeued and killed, and the sweep is cancelled once and resumed."""
    common = [*QUICK, *words, "trainer.max_steps=300", "checkpoint.every_steps=20", *PATIENT]
    hpctrain("-m", *common, "run_dir=straight")
    until_no_task(sandbox)
    hpctrain("-m", *common, "run_dir=struck")
    strikes = Strikes(
        sandbox,
        tmp_path / "struck",
        {"requeue": 1, "preempt": 1, "rank": 2},
        pause_s=4,
        most=12,
        own=(5, lambda _: hpctrain("cancel", "struck")),
    )
    for _ in range(4):
        until_no_task(sandbox, strikes.strike)
        if {run["state"] for run in json.loads(hpctrain("status", "struck", "--json").stdout)} == {"completed"}:
            break
        hpctrain("resume", "struck")
    else:
        pytest.fail(hpctrain("status", "struck").stdout)
    print(strikes)
    assert strikes.own_done
    answers = [json.loads(hpctrain("best", home, "--json").stdout) for home in ("straight", "struck")]
    ranked = [
        [(row["values"], row["best"], row["best_step"], row["last"]) for row in answer["rows"]] for answer in answers
    ]
    assert ranked[0] == ranked[1]
    for number in range(6):
        printed = hpctrain("compare", f"straight/{number}", f"struck/{number}").stdout
        assert "equal, to the last bit: " in printed
    attempts = [Ledger(RunDirectory.at(tmp_path / "struck" / str(number))).attempts() for number in range(6)]
    assert sum(map(len, attempts)) > 6
    assert not orphans(tmp_path / "struck")


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_runs_of_two_nodes_in_one_job_after_another(sandbox: SlurmSandbox, hpctrain: Hpctrain, tmp_path: Path) -> None:
    """Jobs of two ranks train several runs each; they are preempted, requeued, and end at their time limit."""
    words = ["nodes=2", "sweep=asha", "sweep.min_steps=100", "sweep.num_runs=4", "trainer.max_steps=900", SPACE]
    words += ["cluster.max_parallel_runs=1", "checkpoint.every_steps=50", "trainer.eval_every_steps=50", *PATIENT]
    hpctrain("-m", *QUICK, *words, "run_dir=straight")
    until_no_task(sandbox)
    hpctrain("-m", *QUICK, *words, "cluster.time_limit_min=1", "cluster.signal_delay_s=20", "run_dir=struck")
    again = (3, lambda task: sandbox.ask("scontrol", "requeue", task))
    strikes = Strikes(
        sandbox, tmp_path / "struck", {"requeue": 1, "preempt": 1, "rank": 1}, pause_s=6, most=8, own=again
    )
    until_no_task(sandbox, strikes.strike, timeout=600)
    print(strikes)
    assert "the search is complete" in hpctrain("resume", "struck").stdout
    begins = [one for one in read_journal(RunDirectory.at(tmp_path / "struck")) if one.event is JournalEvent.BEGIN]
    assert max(Counter(one.task for one in begins).values()) > 1, "a job that trains several runs"
    attempts = [Ledger(RunDirectory.at(tmp_path / "struck" / str(run))).attempts() for run in range(4)]
    assert {one.world_size for each in attempts for one in each} == {2}
    print([[f"{one.reason} at {one.end_step}" for one in each] for each in attempts])
    for run in range(4):
        assert "equal, to the last bit: " in hpctrain("compare", f"straight/{run}", f"struck/{run}").stdout
    assert not orphans(tmp_path / "struck")


class Strikes:
    """Interrupts the tasks of a sweep one after another: preempted by another job, requeued, a process killed.

    Args:
        sandbox: where they run.
        home: of the sweep.
        kinds: what is drawn, by weight: `requeue`, `preempt`, `rank` (kills a rank) and `task` (kills a batch script).
        pause_s: between two strikes.
        most: how many.
        own: what else is done to a running task, once, after so many strikes.
    """

    def __init__(
        self,
        sandbox: SlurmSandbox,
        home: Path,
        kinds: Mapping[str, int],
        *,
        pause_s: float,
        most: int,
        own: tuple[int, Callable[[str], object]],
    ) -> None:
        self._sandbox, self._home, self._kinds = sandbox, home, kinds
        self._pause_s, self._most, self._own = pause_s, most, own
        self._draw, self._struck, self._last = random.Random(f"strikes {SEED}"), Counter[str](), time.monotonic()

    @property
    def own_done(self) -> bool:
        """Whether enough strikes were made for the caller's own."""
        return bool(self._struck["own"])

    def strike(self) -> None:
        """Strike if it is time."""
        running = [task for task, state in tasks(self._sandbox).items() if state == "RUNNING"]
        if time.monotonic() - self._last < self._pause_s or not running or self._struck.total() >= self._most:
            return
        self._last = time.monotonic()
        (kind,) = self._draw.choices(list(self._kinds), list(self._kinds.values()))
        task = self._draw.choice(running)
        after, own = self._own
        kind = "own" if self._struck.total() == after else kind
        self._struck[kind] += 1
        if kind == "own":
            own(task)
        elif kind == "requeue":
            with contextlib.suppress(AssertionError):  # it may just have ended
                self._sandbox.requeue(task)
        elif kind == "preempt":
            self._sandbox.preempt(nodes=1, seconds=2)
        elif found := processes(self._home, "hpctrain.search" if kind == "task" else "hpctrain.train"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._draw.choice(found), signal.SIGKILL)

    def __str__(self) -> str:
        return f"HPCTRAIN_SOAK_SEED={SEED}: {dict(self._struck)}"


def processes(home: Path, *words: str) -> list[int]:
    """The processes whose command line has all words, and whose folder is this search's."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                command = (folder / "cmdline").read_bytes().decode(errors="replace")
                if str(home) in command and all(word in command for word in words):
                    found.append(int(folder.name))
    return found


def orphans(home: Path) -> list[int]:
    return processes(home, "hpctrain")
