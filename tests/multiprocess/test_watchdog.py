"""Hangs of real ranks. The runs mostly wait, so all of them go at the same time."""

from __future__ import annotations

import re
import subprocess
import time
from dataclasses import dataclass

import pytest

from hpctrain.cli.stacks import main as stacks
from hpctrain.launch.local import free_port, rank_variables
from hpctrain.launch.prepare import prepare
from hpctrain.run.directory import RunDirectory
from hpctrain.run.exit_record import read_exit_records
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason

HANG_TIMEOUT_S = 6
TWO = "cluster.processes_per_node=2"
WORDS = (
    "task=custom",
    "task._target_=tests.multiprocess.programs.slow.Slow",
    "trainer.global_batch_size=8",
    "trainer.max_steps=30",
    "trainer.eval_every_steps=30",
    "logger.tensorboard=false",
    "logger.every_steps=1",
    f"health.hang_timeout_s={HANG_TIMEOUT_S}",
)
LAUNCHED = {
    "rank 1 hangs": ([TWO], {"TRIAL_ACT": "1:5:hang"}),
    "rank 1 is stopped": ([TWO], {"TRIAL_ACT": "1:5:SIGSTOP"}),
    "the others time out": (
        ["cluster.processes_per_node=3", "trainer.global_batch_size=12", "health.hang_timeout_s=100"],
        {"TRIAL_ACT": "1:6:SIGSTOP", "COLLECTIVE_TIMEOUT": "8"},
    ),
    "one rank hangs": ([], {"TRIAL_ACT": "0:5:hang"}),
}
BY_HAND = {
    "ranks by hand": {"TRIAL_ACT": "1:5:hang"},
    "slow phases": {"SLOW_START": "9", "SLOW_EVAL": "9", "TRIAL_SLEEP": "0.1"},
}


@dataclass
class Started:
    """A run and its processes."""

    directory: RunDirectory
    numbers: list[int]

    @property
    def stacks(self):
        """The stacks of each rank that wrote them."""
        files = {rank: self.directory.stacks(1, rank) for rank in range(2)}
        return {rank: file.read_text() for rank, file in files.items() if file.exists()}

    @property
    def processes(self):
        """Command lines that name the run directory."""
        listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        return [line for line in listed.splitlines() if str(self.directory.path) in line]


@pytest.fixture(scope="module")
def runs(fork_server, composer, tmp_path_factory):
    started = {}
    for name, (words, surroundings) in LAUNCHED.items():
        path = tmp_path_factory.mktemp("watchdog") / "run"
        number = fork_server.start("command:run", f"run_dir={path}", *WORDS, *words, **surroundings)
        started[name] = Started(RunDirectory.at(path), [number])
    for name, surroundings in BY_HAND.items():
        path, port = tmp_path_factory.mktemp("watchdog") / "run", free_port()
        prepare(composer.compose([f"run_dir={path}", *WORDS], world_size=2), WORDS)
        places = [rank_variables(rank, 2, port) for rank in range(2)]
        numbers = [fork_server.start("command:rank", str(path), **place, **surroundings) for place in places]
        started[name] = Started(RunDirectory.at(path), numbers)
    return started


@pytest.fixture(scope="module")
def ended(fork_server, runs):
    def wait(name):
        done = fork_server.wait(*runs[name].numbers)
        (attempt,) = Ledger(runs[name].directory).attempts()
        return runs[name], done, attempt

    return wait


@pytest.mark.nightly
def test_a_running_run_shows_its_stacks_and_goes_on(runs, ended, capsys):
    run = runs["slow phases"]
    log = run.directory.rank_log(0)
    deadline = time.monotonic() + 60
    while not (log.exists() and "step 1/30" in log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert stacks([str(run.directory.path)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert [f"stacks as requested: rank {rank} of 2 on " in out for rank in range(2)] == [True, True]
    assert out.count(" in run_attempt\n") == 2
    _, done, attempt = ended("slow phases")
    assert [process.code for process in done] == [0, 0], done[0].output
    assert (attempt.reason, attempt.end_step) == (Reason.COMPLETED, 30)


def test_phases_that_take_longer_than_a_step_may_do_not_hang(ended):
    run, done, attempt = ended("slow phases")
    assert attempt.build_s > HANG_TIMEOUT_S
    assert attempt.eval_s > HANG_TIMEOUT_S
    assert "hang" not in "".join(process.output for process in done)
    assert all(text.count("==== end") == 1 for text in run.stacks.values())


def test_a_rank_that_hangs_ends_the_run_with_the_stacks_of_all(ended):
    run, (done,), attempt = ended("rank 1 hangs")
    assert (done.code, attempt.reason, attempt.end_step) == (1, Reason.HANG, 4), done.output
    assert attempt.detail.startswith("rank 1 on ")
    assert f"no step for {HANG_TIMEOUT_S} s (health.hang_timeout_s); it was at _act in " in attempt.detail
    waited = re.escape(f"; stacks: {run.directory.stacks(1, 1)}; rank 0 waited for others")
    assert re.search(waited + r" in all_reduce \(collective \d+ of gloo default_pg\)$", attempt.detail)
    assert f"hpctrain: {attempt.detail}\n" in done.output
    assert 'trial.py", line' in done.output
    assert "in _act\n" in run.stacks[1]
    assert "/torch/" in run.stacks[0]
    assert {rank: record.blames_peer for rank, record in read_exit_records(run.directory.attempt(1)).items()} == {
        0: True,
        1: False,
    }
    begun = [
        read_exit_records(run.directory.attempt(1))[rank].collectives.begun["gloo default_pg"] for rank in range(2)
    ]
    assert begun[0] > begun[1], "rank 1 never began the one in which rank 0 waits"
    assert attempt.end_time - attempt.start_time < HANG_TIMEOUT_S + 60
    assert run.processes == []


def test_a_rank_that_is_stopped_is_named_by_the_others(ended):
    run, (done,), attempt = ended("rank 1 is stopped")
    assert (done.code, attempt.reason) == (1, Reason.HANG), done.output
    assert attempt.detail.startswith("rank 0 on ")
    assert "; rank 1 left no exit record: stopped, its machine gone" in attempt.detail
    assert re.search(r"; rank 0 waited for others in all_reduce \(collective \d+ of gloo default_pg\)$", attempt.detail)
    assert set(run.stacks) == {0}
    assert attempt.end_time - attempt.start_time < HANG_TIMEOUT_S + 60
    assert run.processes == []


def test_collectives_that_time_out_before_the_watchdog_are_a_hang_too(ended):
    """They don't count as the loss of a peer, since all connections still exist."""
    run, (done,), attempt = ended("the others time out")
    assert (done.code, attempt.reason, attempt.end_step) == (1, Reason.HANG, 4), done.output
    # of ranks 0 and 2 the one that times out first closes the pair that the other one still waits on
    error = "Timed out waiting 8000 ?ms|Application timeout caused pair closure"
    assert re.search(rf"rank [02] on \S+ hangs after step 4: RuntimeError: .*({error})", attempt.detail)
    assert re.search(r"; (rank 1|ranks 1, 2) left no exit record: stopped, its machine gone", attempt.detail)
    records = read_exit_records(run.directory.attempt(1))
    assert 1 not in records
    assert all(record.blames_peer for record in records.values())
    assert run.processes == []


def test_a_run_in_one_process_closes_itself(ended):
    run, (done,), attempt = ended("one rank hangs")
    assert (done.code, attempt.reason, attempt.end_step) == (1, Reason.HANG, 4), done.output
    assert "it was at _act in " in attempt.detail
    assert done.output.endswith(
        f"hpctrain: stacks: {run.directory.stacks(1, 0)}; to resume: python -m hpctrain resume {run.directory.path}\n"
    )
    assert "in _act\n" in run.stacks[0]


def test_ranks_without_a_launcher_close_their_attempt(ended):
    run, done, attempt = ended("ranks by hand")
    assert [process.code for process in done] == [1, 1]
    assert (attempt.reason, attempt.end_step) == (Reason.HANG, 4)
    assert attempt.detail.startswith("rank 1 on ")
    assert set(run.stacks) == {0, 1}
