"""Several losses, groups of parameters and unfreezing: the weights of a hand-written loop, and exact resumes."""

from __future__ import annotations

import random

import pytest
import torch

from hpctrain.run.ledger import Ledger

QUIET = ("logger.tensorboard=false", "checkpoint.keep=100", "trainer.max_epochs=null")
TRIAL = ("task=custom", "task._target_=tests.multiprocess.programs.trial.Trial", *QUIET)
RIVALS = ("task=custom", "task._target_=tests.multiprocess.programs.rivals.Rivals", *QUIET)
CRITIC = (
    "optimizer.named.critic={_target_: torch.optim.Adam, lr: 0.01, match: critic.*, loss: critic_loss, "
    "clip_grad_norm: 0.05}"
)
GENERATOR = (
    "optimizer.named.generator={_target_: torch.optim.SGD, lr: 0.02, momentum: 0.5, match: generator.*, "
    "loss: generator_loss, schedule: {kind: cosine}}"
)
BOTH = {"critic": CRITIC, "generator": GENERATOR}
GROUPS = (
    "optimizer.lr=0.01",
    'optimizer.groups=[{match: "0.*", lr_factor: 0.1, weight_decay: 0.0}]',
)


@pytest.fixture
def by_hand(fork_server, tmp_path):
    """Trains with a hand-written loop, and returns its weights."""

    def run(world_size, what, **options):
        path = tmp_path / "by_hand.pt"
        started = [
            fork_server.start("by_hand_turns:main", str(path), rank, world_size, what, options)
            for rank in range(world_size)
        ]
        for done in fork_server.wait(*started):
            assert done.code == 0, done.output
        return torch.load(path, weights_only=True)

    return run


def shaped(world_size, accumulation, kind):
    """The data of a training, and hpctrain's keys for it."""
    batch, steps, samples = 8, 9, 40
    micro = batch // world_size // accumulation
    words = [
        f"precision={kind}",
        f"trainer.global_batch_size={batch}",
        f"trainer.micro_batch_size={micro}",
        f"trainer.max_steps={steps}",
        f"+task.num_samples={samples}",
    ]
    return {"kind": kind, "steps": steps, "batch": batch, "micro": micro, "samples": samples}, words


def require_equal(run, expected):
    saved = torch.load(run.directory.checkpoint(9) / "model.pt", weights_only=True)
    assert saved.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(saved[name], value), name


def shapes(*gate):
    """All world sizes, accumulations and precisions; those outside of the gate are nightly."""
    every = [(size, accumulation, kind) for size in (1, 2) for accumulation in (1, 4) for kind in ("fp32", "bf16")]
    return [shape if shape in gate else pytest.param(*shape, marks=pytest.mark.nightly) for shape in every]


@pytest.mark.parametrize(
    ("order", "every"),
    [
        (("critic", "generator"), {"critic": 1, "generator": 3}),
        pytest.param(("critic", "generator"), {"critic": 1, "generator": 1}, marks=pytest.mark.nightly),
        pytest.param(("generator", "critic"), {"critic": 1, "generator": 1}, marks=pytest.mark.nightly),
        pytest.param(("generator", "critic"), {"critic": 2, "generator": 1}, marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize(("world_size", "accumulation", "kind"), shapes((2, 4, "fp32")))
def test_turns_are_those_of_a_hand_written_loop(train, by_hand, world_size, accumulation, kind, order, every):
    data, words = shaped(world_size, accumulation, kind)
    expected = by_hand(world_size, "turns", order=order, every=every, **data)
    optimizers = [f"{BOTH[name][:-1]}, every_steps: {every[name]}}}" for name in order]
    # an evaluation would draw from the random numbers of the training
    words += ["optimizer=named", *optimizers, "+task.eval_samples=0"]
    code, run, output = train("run", *RIVALS, *words, world_size=world_size)
    assert code == 0, output
    require_equal(run, expected)
    record = next(record for record in reversed(run.metrics) if "train/loss" in record)
    # a turn that doesn't take part in every step isn't in the sum
    names = [f"train/loss/{name}" for name in order if every[name] == 1]
    assert record["train/loss"] == pytest.approx(sum(record[name] for name in names))
    assert {"train/lr/critic", "train/lr/generator", "train/grad_norm/critic", "train/real"} <= record.keys()
    assert "train/lr" not in record


@pytest.mark.parametrize(("world_size", "accumulation", "kind"), shapes())
@pytest.mark.parametrize("task", ["Trial", "Kept"])
def test_groups_are_those_of_a_hand_written_loop(train, by_hand, world_size, accumulation, kind, task):
    data, words = shaped(world_size, accumulation, kind)
    expected = by_hand(world_size, "groups", **data)
    words += [*TRIAL, f"task._target_=tests.multiprocess.programs.trial.{task}", *GROUPS]
    code, run, output = train("run", *words, world_size=world_size)
    assert code == 0, output
    require_equal(run, expected)
    assert {record["train/lr"] for record in run.metrics if "train/lr" in record} == {0.01}


SEVERAL = (
    *RIVALS,
    "optimizer=named",
    CRITIC,
    f"{GENERATOR[:-1]}, every_steps: 2}}",
    "+task.batchnorm=true",
    "trainer.ema_decay=0.9",
)
UNFROZEN = (
    *TRIAL,
    "+task.batchnorm=true",
    "+task.dropout=0.3",
    "optimizer.lr=0.01",
    'optimizer.groups=[{match: "0.*", lr_factor: 0.5, unfreeze_at_step: 5}, {match: "1.*", unfreeze_at_epoch: 1}]',
    "trainer.ema_decay=0.9",
)
TEACHER = (*TRIAL, "task._target_=tests.multiprocess.programs.rivals.Distilled", "optimizer=sgd", "optimizer.lr=0.05")
LENGTH = (
    "trainer.global_batch_size=12",
    "trainer.max_steps=14",
    "+task.num_samples=48",
    "logger.every_steps=3",
    "checkpoint.every_steps=1",
    "checkpoint.asynchronous=false",
)


@pytest.mark.parametrize(
    ("words", "world_size"),
    [
        pytest.param(UNFROZEN, 1),
        *(
            pytest.param(words, world_size, marks=pytest.mark.nightly)
            for words, world_size in (
                ((*TRIAL, *GROUPS), 1),
                ((*TRIAL, *GROUPS), 2),
                (SEVERAL, 1),
                (SEVERAL, 2),
                (SEVERAL, 3),
                ((*SEVERAL, "precision=fp16", "precision.initial_loss_scale=16777216"), 2),
                (UNFROZEN, 2),
                (UNFROZEN, 3),
                ((*UNFROZEN, "precision=fp16_master"), 2),
                (TEACHER, 3),
                ((*TEACHER, "parallel.static_graph=true", "trainer.micro_batch_size=2"), 3),
                ((*SEVERAL, "parallel.static_graph=true", "trainer.micro_batch_size=2"), 3),
            )
        ),
    ],
)
def test_an_interrupted_run_is_the_straight_run(train, words, world_size):
    code, straight, output = train("straight", *words, *LENGTH, world_size=world_size)
    assert code == 0, output
    chance = random.Random(repr(words) + str(world_size))
    # an attempt gains at most four of the 14 steps, so each is killed
    for act in [f"{world_size - 1}:{chance.randrange(2, 6)}:SIGKILL" for _ in range(3)]:
        everyone = ",".join(act.replace(act.partition(":")[0], str(rank), 1) for rank in range(world_size))
        code, run, output = train("run", *words, *LENGTH, world_size=world_size, TRIAL_ACT=everyone)
        assert code == -9, output
    code, run, output = train("run", *words, *LENGTH, world_size=world_size)
    assert code == 0, output
    assert len(Ledger(run.directory).attempts()) == 4
    assert (run.digest, run.metrics) == (straight.digest, straight.metrics)


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_optimizer_that_steps_within_a_loss_is_refused(train, world_size):
    code, run, output = train(
        "run",
        *TRIAL,
        "task._target_=tests.multiprocess.programs.rivals.Meddler",
        "trainer.max_steps=2",
        world_size=world_size,
    )
    assert code == 1
    assert "Meddler.loss steps an optimizer of its own (SGD)" in output
    assert run.steps == []


@pytest.mark.nightly
def test_a_run_goes_on_only_with_the_optimizers_that_were_saved(train):
    words = [*RIVALS, "optimizer=named", CRITIC, GENERATOR, "trainer.max_steps=4", "trainer.global_batch_size=8"]
    code, _, output = train("run", *words)
    assert code == 0, output
    changed = [word.replace("named.critic", "named.judge") for word in words]
    code, _, output = train("run", *changed, "trainer.max_steps=6", "resume.allow_config_change=true")
    assert code != 0
    assert "the checkpoint has the optimizers critic, generator, the configuration has judge, generator" in output
