"""Weights equal those of a hand-written loop, bit for bit, whenever and however often a run is interrupted."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hpctrain.checkpoint.state import weights_digest
from hpctrain.data.order import ShuffledOrder
from hpctrain.run.checkpoints import list_checkpoints
from tests.multiprocess.programs.compared_runs import taken

QUIET = (
    "task=custom",
    "task._target_=tests.multiprocess.programs.trial.Trial",
    "logger.tensorboard=false",
    "checkpoint.keep=100",
)
SCHEDULE = ("schedule=cosine", "optimizer.lr=0.01")


def overrides(options):
    return [f"+task.{name}={value}" for name, value in options.items()]


@pytest.fixture
def by_hand(fork_server, ranks, tmp_path):
    """Trains with the hand-written loop, and returns its weights."""

    def run(world_size, **options):
        path = tmp_path / "by_hand.pt"
        numbers = [
            fork_server.start("by_hand:main", str(path), rank, world_size, {**options}) for rank in range(world_size)
        ]
        for done in fork_server.wait(*numbers):
            assert done.code == 0, done.output
        return torch.load(path, weights_only=True)

    return run


@pytest.mark.parametrize(
    ("world_size", "accumulation", "options"),
    [
        (1, 1, {"samples": 40, "steps": 12}),
        (1, 4, {"samples": 45, "steps": 13}),
        pytest.param(1, 1, {"samples": 45, "steps": 13, "drop_last": True}, marks=pytest.mark.nightly),
        (1, 2, {"samples": 45, "steps": 9, "dropout": 0.3, "batchnorm": True}),
        (1, 1, {"samples": 40, "steps": 9, "clip": 0.05}),
        pytest.param(2, 1, {"samples": 40, "steps": 12, "batchnorm": True}, marks=pytest.mark.nightly),
        pytest.param(2, 4, {"samples": 43, "steps": 13}, marks=pytest.mark.nightly),
        pytest.param(2, 1, {"samples": 41, "steps": 13}, marks=pytest.mark.nightly),
        (2, 4, {"samples": 43, "steps": 13, "drop_last": True, "dropout": 0.3}),
        pytest.param(3, 1, {"samples": 54, "steps": 12, "batchnorm": True}, marks=pytest.mark.nightly),
        pytest.param(3, 4, {"samples": 50, "steps": 13, "dropout": 0.3}, marks=pytest.mark.nightly),
        pytest.param(3, 1, {"samples": 49, "steps": 13}, marks=pytest.mark.nightly),
    ],
)
def test_the_weights_of_a_hand_written_loop(train, by_hand, world_size, accumulation, options):
    batch = 24 if world_size == 3 else 8
    options |= {"batch": batch, "micro": batch // world_size // accumulation}
    expected = by_hand(world_size, **options)
    model = {name: options[name] for name in ("dropout", "batchnorm") if name in options}
    code, run, output = train(
        "run",
        *QUIET,
        *SCHEDULE,
        *overrides({"num_samples": options["samples"], **model}),
        f"trainer.global_batch_size={batch}",
        f"trainer.micro_batch_size={options['micro']}",
        f"trainer.max_steps={options['steps']}",
        f"data.drop_last={options.get('drop_last', False)}",
        f"trainer.clip_grad_norm={options.get('clip', 'null')}",
        world_size=world_size,
    )
    assert code == 0, output
    saved = torch.load(run.directory.checkpoint(options["steps"]) / "model.pt", weights_only=True)
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in expected)
    assert run.digest == weights_digest(expected)


def test_the_hand_written_loop_notices_another_order(by_hand):
    options = {"samples": 40, "steps": 5, "batch": 8, "micro": 8}
    first, other = by_hand(1, **options), by_hand(1, **options, seed=1)
    assert weights_digest(first) != weights_digest(other)


TRAINING = (
    *QUIET,
    *SCHEDULE,
    *overrides({"dropout": 0.3, "batchnorm": True, "noise": True, "num_samples": 56}),
    "trainer.global_batch_size=12",
    "trainer.max_steps=14",
    "logger.every_steps=3",
)
"""Five steps an epoch, the last one partial; the log's windows begin and end anywhere in it."""


@pytest.fixture(scope="module")
def straight(fork_server, tmp_path_factory):
    """Uninterrupted runs, by world size: made once."""
    return {}


@pytest.fixture
def straight_run(straight, train, tmp_path):
    def run(world_size):
        if world_size not in straight:
            code, found, output = train("straight", *TRAINING, world_size=world_size)
            assert code == 0, output
            straight[world_size] = (found.digest, found.metrics)
        return straight[world_size]

    return run


# In each attempt the signal comes in one call of the loss, counted from 1. Alone, a rank stops after that step; several
# agree at the first steps of an attempt, and then about once a second: a signal in call 1 stops them after the
# attempt's step 2, one in call 2 or 3 after its step 3. At the end of an epoch the stop comes before the evaluation.
ONE = {
    "first step": ([("SIGTERM", 1)], [1]),
    "middle": ([("SIGUSR2", 7)], [7]),
    "end of an epoch": ([("SIGUSR1", 5)], [5]),
    "after an epoch's first step": ([("SIGTERM", 6)], [6]),
    "last step": ([("SIGTERM", 14)], [14]),
    "three times": ([("SIGTERM", 2), ("SIGUSR2", 3), ("SIGINT", 6)], [2, 5, 11]),
}
SEVERAL = {
    "first steps": ([("SIGTERM", 1)], [2]),
    "end of an epoch": ([("SIGUSR2", 1), ("SIGTERM", 2)], [2, 5]),
    "last step": ([("SIGTERM", 3), ("SIGTERM", 2), ("SIGUSR1", 3), ("SIGTERM", 2), ("SIGTERM", 1)], [3, 6, 9, 12]),
}


@pytest.mark.parametrize(
    ("world_size", "workers", "name"),
    [
        (1, 0, "first step"),
        (1, 2, "three times"),
        (2, 0, "first steps"),
        (2, 2, "end of an epoch"),
        *[
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (
                (1, 0, "middle"),
                (1, 0, "end of an epoch"),
                (1, 0, "last step"),
                (1, 0, "after an epoch's first step"),
                (1, 0, "three times"),
                (2, 0, "last step"),
                (2, 0, "end of an epoch"),
                (3, 0, "first steps"),
                (3, 0, "last step"),
                (3, 0, "end of an epoch"),
                (3, 2, "end of an epoch"),
            )
        ],
    ],
)
def test_an_interrupted_run_is_the_straight_run(train, straight_run, world_size, workers, name):
    expected = straight_run(world_size)
    words = [*TRAINING, f"data.num_workers={workers}"]
    acts, stops = (ONE if world_size == 1 else SEVERAL)[name]
    victim, throwaway = world_size - 1, int(world_size > 2)
    signals = [f"{victim}:{call + throwaway}:{signal}" for signal, call in acts]
    for number, act in enumerate([*signals, ""][: max(len(acts), len(stops) + 1)]):
        code, run, output = train("run", *words, world_size=world_size, TRIAL_ACT=act)
        assert code == (4 if number < len(stops) else 0), output
    starts = [0, *stops]
    assert run.attempts == [
        *[(start, "interrupted", stop) for start, stop in zip(starts, stops, strict=False)],
        (starts[-1], "completed", 14),
    ]
    assert (run.digest, run.metrics) == expected
    assert run.metrics[-1].keys() == {"step", "eval/loss"}


@pytest.mark.parametrize(("step", "codes"), [(5, [-9, 0, 0]), pytest.param(14, [0, 0], marks=pytest.mark.nightly)])
def test_an_evaluation_that_a_stop_put_off_is_recorded_once(train, straight_run, step, codes):
    """The next attempt catches up on it; if that is killed before its next save, the one after it does so again."""
    code, run, output = train("run", *TRAINING, TRIAL_ACT=f"0:{step}:SIGTERM")
    assert (code, run.steps[-1]) == (4, step), output
    assert run.metrics[-1].keys() != {"step", "eval/loss"}
    for expected in codes:
        code, run, output = train("run", *TRAINING, TRIAL_ACT="0:1:SIGKILL" if expected else "")
        assert code == expected, output
    assert (run.digest, run.metrics) == straight_run(1)


@pytest.mark.nightly
def test_another_number_of_loading_processes_and_saves_in_between_change_nothing(train, straight_run):
    digest, metrics = straight_run(2)
    words = ["data.num_workers=1", "checkpoint.every_steps=4", "checkpoint.asynchronous=false"]
    words += ["checkpoint.keep_best=0"]
    _, run, _ = train("run", *TRAINING, *words, world_size=2)
    assert (run.digest, run.metrics) == (digest, metrics)
    assert run.steps == [4, 8, 12, 14]
    for info in list_checkpoints(run.directory)[:-1]:
        assert info.weights_digest != digest


def test_a_run_goes_on_with_four_two_one_and_four_ranks(train):
    """Each step has the same samples and learning rate; accumulation makes up for missing ranks."""
    words = [*QUIET, *SCHEDULE, *overrides({"num_samples": 45}), "logger.samples=true", "logger.every_steps=1"]
    words += ["trainer.global_batch_size=8", "trainer.micro_batch_size=2", "trainer.max_steps=14"]
    code, straight, output = train("straight", *words, world_size=4)
    assert code == 0, output
    stops = {(4, "3:2:SIGTERM"): 2, (2, "1:1:SIGTERM"): 4, (1, "0:9:SIGUSR2"): 7, (4, ""): 14}
    for (world_size, act), stop in stops.items():
        code, run, output = train("run", *words, world_size=world_size, TRIAL_ACT=act)
        assert code == (4 if act else 0), output
        assert run.attempts[-1][2] == stop
    order, per_epoch = ShuffledOrder(45, seed=0), math.ceil(45 / 8)
    expected = {}
    for step in range(14):
        begin = step % per_epoch * 8
        expected[step + 1] = sorted(order(step // per_epoch, np.arange(begin, min(begin + 8, 45))).tolist())
    assert taken(run) == taken(straight) == expected
    rates = [[entry.get("train/lr") for entry in found.metrics] for found in (run, straight)]
    assert rates[0] == rates[1]
    last = [[entry for entry in found.metrics if "eval/loss" in entry][-1]["eval/loss"] for found in (run, straight)]
    assert last[0] == pytest.approx(last[1], rel=1e-4)


def test_a_number_of_ranks_that_cannot_share_the_batch_names_those_that_can(train):
    words = [*QUIET, "trainer.global_batch_size=8", "trainer.micro_batch_size=2", "trainer.max_steps=4"]
    code, run, _ = train("run", *words, world_size=2, TRIAL_ACT="0:1:SIGTERM,1:1:SIGTERM")
    assert code == 4
    code, run, output = train("run", *words, world_size=3)
    assert code == 2
    assert "trainer.global_batch_size=8: cannot be divided among 3 ranks with micro-batches of 2" in output
    assert "run 1, 2 or 4 processes" in output
    assert run.steps == [2]


@pytest.mark.nightly
def test_what_an_optimizer_keeps_in_its_groups_is_restored_and_changed_options_apply(train):
    """Entries that exist from the start, and one that the first step adds; none is an option of the configuration."""
    words = [
        *QUIET,
        "optimizer=custom",
        "optimizer._target_=tests.multiprocess.programs.adapting.Adapting",
        "trainer.global_batch_size=8",
    ]
    words += ["schedule=constant", "trainer.max_steps=6"]

    def groups(run, step):
        return torch.load(run.directory.checkpoint(step) / "optimizer.pt", weights_only=True)["param_groups"]

    code, straight, output = train("straight", *words)
    assert code == 0, output
    for act, expected in (("0:3:SIGTERM", 4), ("", 0)):
        code, run, output = train("run", *words, TRIAL_ACT=act)
        assert code == expected, output
    assert run.attempts[0] == (0, "interrupted", 3)
    assert run.digest == straight.digest
    assert groups(run, 6) == groups(straight, 6)
    assert groups(run, 6)[0]["step"] == 6
    changes = ["+optimizer.weight_decay=0.1", "resume.allow_config_change=true", "trainer.max_steps=8"]
    code, run, output = train("run", *words, *changes)
    assert code == 0, output
    (found,) = groups(run, 8)
    assert (found["weight_decay"], found["k"], found["step"]) == (0.1, 8, 8)
    assert found["d"] == pytest.approx(1.1**8)
