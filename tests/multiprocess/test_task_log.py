"""What a task logs is the same in an interrupted run as in a straight one: no point twice, none missing."""

from __future__ import annotations

import csv
import hashlib
import os
import random

import pytest

from hpctrain.files import read_json_lines
from tests.support.tensorboard_points import points

STEPS = 11
WORDS = (
    *(
        "task=custom",
        "task._target_=tests.multiprocess.programs.noting.Noting",
        "+task.num_samples=32",
        "+task.eval_samples=10",
    ),
    *("trainer.global_batch_size=8", "trainer.micro_batch_size=2", f"trainer.max_steps={STEPS}"),
    *("trainer.eval_every_steps=3", "trainer.sanity_batches=1", "logger.every_steps=3", "logger.csv=true"),
    *("logger.measure=false", "checkpoint.every_steps=1", "checkpoint.asynchronous=false"),
)
"""Accumulation of 4 and 2 at world sizes 1 and 2; most windows of the log hold several saves."""


TURNS = (
    *("task._target_=tests.multiprocess.programs.noting.NotingRivals", "optimizer=named"),
    "optimizer.named.critic={_target_: torch.optim.Adam, lr: 0.01, match: critic.*, loss: critic_loss}",
    "optimizer.named.generator={_target_: torch.optim.SGD, lr: 0.02, match: generator.*, loss: generator_loss}",
    "optimizer.named.generator.every_steps=2",
)


def timeless(records):
    return [{name: value for name, value in record.items() if name != "time"} for record in records]


def table(path):
    with path.open(newline="") as file:
        head, *rows = csv.reader(file)
    kept = [index for index, name in enumerate(head) if name != "time" and not name.startswith("throughput/")]
    return [[row[index] for index in kept] for row in [head, *rows]]


def outcome(run):
    directory = run.directory
    files = {
        str(path.relative_to(directory.path)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in directory.media.glob("*/*")
    }
    media = timeless(read_json_lines(directory.media_records))
    assert {record["file"] for record in media} == files.keys()
    return run.digest, run.metrics, media, files, table(directory.metrics_csv), points(directory.tensorboard)


def requires_all_points(run):
    """Each record of metrics.jsonl and media.jsonl is one point in TensorBoard."""
    shown = points(run.directory.tensorboard)
    expected = {}
    for record in run.metrics:
        for name in record.keys() - {"step"}:
            expected.setdefault(name, []).append(record["step"])
    for record in read_json_lines(run.directory.media_records):
        expected.setdefault(record["name"], []).append(record["step"])
    assert {tag: [step for step, _ in found] for tag, found in shown.items()} == expected


@pytest.fixture
def interrupted(train):
    """Runs straight, and with these acts, one attempt each; compares all that was logged."""

    def run_all(world_size, attempts, words=("optimizer.lr=0.01",)):
        code, straight, output = train("straight", *WORDS, *words, world_size=world_size)
        assert code == 0, output
        for act in (*attempts, {}):
            code, run, output = train("run", *WORDS, *words, world_size=world_size, **act)
            assert (code == 0) is (not act), output
        assert len(run.attempts) == len(attempts) + 1
        assert outcome(run) == outcome(straight)
        requires_all_points(run)
        return run

    return run_all


def kill(world_size, steps, turns=1):
    """An attempt whose ranks die in the middle of a step, after so many of its own."""
    call = steps * (4 // world_size) * turns + 2
    return {"TRIAL_ACT": ",".join(f"{rank}:{call}:SIGKILL" for rank in range(world_size))}


def killed_in_evaluation(world_size, batch):
    """An attempt whose ranks die in a batch of an evaluation; the first is evaluated before the first step."""
    return {"NOTING_ACT": ",".join(f"{rank}:{batch}:SIGKILL" for rank in range(world_size))}


def test_killed_twice_with_two_ranks(interrupted):
    run = interrupted(2, [kill(2, 4), kill(2, 3)])
    names = {name for record in run.metrics for name in record}
    assert {
        "train/of_rank_0",
        "train/of_rank_1",
        "train/late",
        "train/in_turn",
        "train/progress",
        "eval/first",
    } <= names


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("number", range(4))
def test_killed_at_three_random_steps(interrupted, world_size, number):
    draws = random.Random(f"{os.environ.get('HPCTRAIN_SOAK_SEED', '')}/{world_size}/{number}")
    cuts = sorted(draws.sample(range(STEPS), 3))
    print("killed in the steps after", cuts)
    starts = [0, *cuts]
    interrupted(world_size, [kill(world_size, cut - start) for start, cut in zip(starts, cuts, strict=False)])


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_evaluation_that_is_abandoned_and_one_that_is_repeated(interrupted, world_size):
    """Stopped in the evaluation of step 3, killed when it is repeated, and, after it is saved, in that of step 6."""
    stop, killed = {"NOTING_ACT": "0:3:SIGUSR1"}, killed_in_evaluation(world_size, 2)
    run = interrupted(world_size, [stop, killed, kill(world_size, 0), killed])
    assert [start for start, _, _ in run.attempts] == [0, 3, 3, 3, 5]


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_task_that_logs_in_its_turns(interrupted, world_size):
    run = interrupted(world_size, [kill(world_size, 2, 2), kill(world_size, 1, 2), kill(world_size, 3, 2)], TURNS)
    names = {name for record in run.metrics for name in record}
    assert {"train/loss/critic", "train/loss/generator", "train/real", "train/of_rank_0", "train/position"} <= names


@pytest.mark.nightly
def test_another_number_of_ranks_has_the_same_records(train):
    """The values of rank one's own names are those of its steps; in the window of the change they are of both."""
    words = (*WORDS, "optimizer.lr=0.01")
    for world_size, act in ((2, kill(2, 4)), (1, kill(1, 3)), (2, {})):
        code, run, output = train("run", *words, world_size=world_size, **act)
        assert (code == 0) is (not act), output
    assert [start for start, _, _ in run.attempts] == [0, 4, 7]
    requires_all_points(run)
    steps = [(record["step"], "train/loss" in record) for record in run.metrics]
    assert steps == [(3, True), (3, False), (6, True), (6, False), (9, True), (9, False), (11, True), (11, False)]
    assert ["train/of_rank_1" in record for record in run.metrics if "train/loss" in record] == [True, True, True, True]
