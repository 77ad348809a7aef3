"""Programs of Lightning, Accelerate and Hugging Face on a real SLURM, interrupted in every way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from hpctrain.drill.comparison import compare_last_saves, compare_metrics
from hpctrain.results.run_comparison import logged_metrics
from hpctrain.run.directory import RunDirectory
from hpctrain.run.saves import last_save
from tests.slurm.programs.followed_run import FollowedRun
from tests.slurm.programs.submitted_runs import PROGRAMS, SubmittedRuns

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples" / "programs"
LENGTHS = {"lightning_program": 8, "accelerate_program": 220, "hf_trainer": 220}
"""By program: its argument, epochs of 28 steps or steps. Saves are at the end of an epoch, or 50 steps apart."""
PACKAGES = {"lightning_program": "lightning", "accelerate_program": "accelerate", "hf_trainer": "transformers"}
SLOW_S = 1.0
"""How long a step takes while SLURM is at work: it may need half a minute."""


def command(program: str, pace: Path) -> list[str]:
    words = [PROGRAMS / "paced.py", pace, EXAMPLES / f"{program}.py", LENGTHS[program]]
    return [sys.executable, *map(str, words)]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], RunDirectory]:
    """Runs on two ranks of this machine, which nothing interrupts, by the same command; each is made once."""
    folder = tmp_path_factory.mktemp("straight_programs")
    (folder / "pace").write_text("0")

    def run(program: str) -> RunDirectory:
        path = folder / program
        if not path.exists():
            words = ["cluster.processes_per_node=2", "cluster.cpus_per_process=1", f"run_dir={path}"]
            typed = [sys.executable, "-m", "hpctrain", "run", *words, "--", *command(program, folder / "pace")]
            done = subprocess.run(typed, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
        return RunDirectory.at(path)

    return run


def preempt(run: FollowedRun) -> None:
    run.preempt()


def wait_for_time_limit(run: FollowedRun) -> None:
    pass


def kill_program(run: FollowedRun) -> None:
    os.kill(program_of(run.rank(1)), signal.SIGKILL)


def stop_program(run: FollowedRun) -> None:
    os.kill(program_of(run.rank(1)), signal.SIGSTOP)


def kill_node(run: FollowedRun) -> None:
    run.sandbox.kill_node(run.attempts[0].nodes[1])


def program_of(rank: int) -> int:
    """The process of the program that a rank runs."""
    children = Path(f"/proc/{rank}/task/{rank}/children").read_text().split()
    (program,) = [int(child) for child in children if "paced.py" in Path(f"/proc/{child}/cmdline").read_text()]
    return program


def event(
    name: str, interrupt: Callable[[FollowedRun], None], reason: str, *words: str, sandbox: tuple[str, ...] = ()
) -> object:
    """A parameter that stands for an interruption of runs with these words, on a sandbox with these options."""
    return pytest.param(interrupt, reason, words, id=name, marks=pytest.mark.sandbox(*sandbox))


EVENTS = [
    event("requeue", preempt, "preempted"),
    event("cancel", preempt, "preempted", sandbox=("--preempt-mode=CANCEL",)),
    event("no_grace", preempt, "preempted", sandbox=("--grace-time=0",)),
    # of one minute, the imports would take too much
    event("time_limit", wait_for_time_limit, "time_limit", "cluster.time_limit_min=2", "cluster.signal_delay_s=10"),
    event("rank_killed", kill_program, "infrastructure"),
    event("rank_stopped", stop_program, "hang", "health.hang_timeout_s=10"),
    event("node_killed", kill_node, "node_failure", sandbox=("--node-timeout=10",)),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("interrupt", "reason", "words"), EVENTS)
@pytest.mark.parametrize("program", LENGTHS)
def test_it_ends_as_a_straight_run(
    program: str,
    interrupt: Callable[[FollowedRun], None],
    reason: str,
    words: tuple[str, ...],
    runs: SubmittedRuns,
    straight: Callable[[str], RunDirectory],
) -> None:
    if find_spec(PACKAGES[program]) is None:
        pytest.skip(f"{PACKAGES[program]} isn't installed")
    uninterrupted = straight(program)
    run = runs.new(pace_s=0.05)
    runs.launch(run, command(program, run.pace), *words)
    run.until(lambda: last_save(run.directory), "the first save", timeout_s=240)  # after long imports
    run.set_pace(SLOW_S)
    begun = len(run.attempts)  # on a busy machine, more than one before the first save at a time limit
    saved = last_save(run.directory)
    assert saved is not None
    interrupt(run)
    run.until(lambda: len(run.attempts) > begun, "the next attempt", timeout_s=240)
    if reason == "node_failure":
        run.sandbox.revive_node(run.attempts[0].nodes[1])
    run.set_pace(0)

    assert run.until_ended() == "COMPLETED"
    assert set(run.reasons[:-1]) == {reason}, run
    assert run.reasons[-1] == "completed", run
    assert len(run.attempts) == 2 or reason == "time_limit", run
    continued = run.attempts[-1].start_step
    assert continued is not None
    assert continued >= saved.step, run
    if reason in {"preempted", "time_limit"}:
        assert continued == run.attempts[-2].end_step, run
    assert_equal(uninterrupted, run.directory)


def assert_equal(straight: RunDirectory, interrupted: RunDirectory) -> None:
    """The tensors of the last save and every reported metric are equal bit by bit."""
    saves = compare_last_saves(straight, interrupted, ())
    assert not saves.unproven, saves.unproven
    rows = [*saves.rows, *compare_metrics(logged_metrics(straight), logged_metrics(interrupted))]
    assert [row for row in rows if not row.equal] == []
    assert any("loss" in row.what for row in rows)
