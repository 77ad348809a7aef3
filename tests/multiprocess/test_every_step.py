"""A run that is killed in the middle of any of its steps ends as an uninterrupted run does."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from hpctrain.data.plan import BatchPlan
from hpctrain.run.checkpoints import list_checkpoints

SAMPLES, BATCH, MICRO, STEPS, PER_EPOCH = 40, 16, 2, 7, 3
WORDS = (
    "task=custom",
    "task._target_=tests.multiprocess.programs.trial.Trial",
    f"+task.num_samples={SAMPLES}",
    "+task.dropout=0.3",
    "+task.batchnorm=true",
    "+task.noise=true",
    f"trainer.global_batch_size={BATCH}",
    f"trainer.micro_batch_size={MICRO}",
    f"trainer.max_steps={STEPS}",
    "trainer.ema_decay=0.9",
    "schedule=cosine",
    "optimizer.lr=0.01",
    "logger.every_steps=2",
    "logger.samples=true",
    "logger.tensorboard=false",
    "checkpoint.every_steps=1",
    "checkpoint.asynchronous=false",
    "checkpoint.keep_best=1",
    # less than the fork server waits: ranks that stand still end with their stacks, and the test shows where they were
    "health.start_timeout_s=100",
    "health.hang_timeout_s=100",
)
"""Three steps an epoch, the last one half full; accumulation of 8, 4 and 2 at world sizes 1, 2 and 4."""
CHAIN = tuple(range(STEPS))
"""Steps that are done when the ranks die: none, amid an epoch, at its end (3, 6) and right after it (4). In a chain the
next attempt resumes there, so an attempt dies in each of the steps, and one resumes from each.
"""


def killing(world_size, start, cut):
    """Has every rank die in the step after ``cut``, between two micro-batches where it has several."""
    plan = BatchPlan(SAMPLES, BATCH, MICRO, world_size, drop_last=False)
    done = sum(plan.micro_batches(plan.step_samples(step)) for step in range(start, cut))
    # three ranks and more begin with a throwaway backward
    call = done + min(2, plan.micro_batches(plan.step_samples(cut))) + int(world_size > 2)
    return ",".join(f"{rank}:{call}:SIGKILL" for rank in range(world_size))


def samples(run, world_size):
    """The samples of each rank at each step; of a repeated step, those of the last time."""
    logs = [run.directory.sample_log(rank).read_text().splitlines() for rank in range(world_size)]
    return [{entry["step"]: entry["samples"] for entry in map(json.loads, log)} for log in logs]


def outcome(run, world_size):
    scores = {info.step: info.score for info in list_checkpoints(run.directory)}
    return run.digest, run.metrics, samples(run, world_size), scores


@pytest.fixture(scope="module")
def straight():
    """The outcomes of uninterrupted runs by world size; each is made once."""
    return {}


@pytest.fixture
def killed_at(train, straight):
    """Kill a run in each of these steps, finish it, and compare it with an uninterrupted one."""

    def run_chain(world_size, cuts, workers):
        if world_size not in straight:
            code, run, output = train("straight", *WORDS, "data.num_workers=0", world_size=world_size)
            assert code == 0, output
            straight[world_size] = outcome(run, world_size)
            assert len(straight[world_size][1]) == 4 + 3  # windows of the log, evaluations
        starts = (0, *cuts)
        acts = [killing(world_size, start, cut) for start, cut in zip(starts, cuts, strict=False)]
        for number, act in enumerate([*acts, ""]):
            num_workers = workers[number * len(workers) // (len(acts) + 1)]
            words = [*WORDS, f"data.num_workers={num_workers}"]
            code, run, output = train("run", *words, world_size=world_size, TRIAL_ACT=act)
            assert code == (-9 if act else 0), output
        assert [start for start, _, _ in run.attempts] == list(starts)
        assert outcome(run, world_size) == straight[world_size]

    return run_chain


@pytest.mark.parametrize(
    "world_size", [pytest.param(1, marks=pytest.mark.nightly), 2, pytest.param(4, marks=pytest.mark.nightly)]
)
def test_killed_at_every_step_one_after_the_other(killed_at, world_size):
    """Without loading processes in the first half, with two in the second."""
    killed_at(world_size, CHAIN, workers=(0, 2))


@pytest.mark.nightly
def test_killed_after_several_steps_three_times(killed_at):
    killed_at(2, (2, 4, 6), workers=(2,))


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(
    ("workers", "cuts"), [*((0, (cut,)) for cut in range(STEPS)), (0, (1, 3, 5)), (2, (1, 3, 5)), (2, (2, 4, 6))]
)
def test_killed_at_any_step(killed_at, world_size, workers, cuts):
    killed_at(world_size, cuts, workers=(workers,))


@pytest.mark.parametrize("start_method", ["fork", pytest.param("forkserver", marks=pytest.mark.nightly)])
def test_loading_processes_die_with_their_rank(fork_server, tmp_path, start_method):
    """One that survives keeps the rank's sockets open, and so the port of the next attempt's rendezvous."""
    (done,) = fork_server.wait(fork_server.start("abandon:main", str(tmp_path / "pids"), start_method))
    assert done.code == -9, done.output
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 4.5  # PyTorch's own watch looks every 5 s
    while any(running(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
