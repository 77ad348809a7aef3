"""Every precision that a CPU supports: the weights of a hand-written loop, exact resumes, and a stop at NaN."""

from __future__ import annotations

import math
import re

import pytest
import torch

from hpctrain.checkpoint.state import weights_digest
from hpctrain.run.ledger import Ledger

KINDS = ("fp32", "bf16", "fp16", "bf16_pure", "fp16_master")
SHAPES = ((1, 1), (1, 4), (2, 1), (2, 4))
"""Ranks and accumulation."""
GATE = {*((2, 1, kind) for kind in KINDS), (1, 4, "fp32"), (1, 4, "fp16_master")}
QUIET = (
    "task=custom",
    "task._target_=tests.multiprocess.programs.trial.Trial",
    "logger.tensorboard=false",
    "checkpoint.keep=100",
)
SCHEDULE = ("schedule=cosine", "optimizer.lr=0.01")
MODEL = ("+task.batchnorm=true", "+task.dropout=0.3")
OVERFLOWS = 2.0**24
"""A loss scale at which the first updates overflow and are skipped."""


@pytest.fixture
def by_hand(fork_server, tmp_path):
    """Trains with the hand-written loop; its weights, and how many updates it skipped."""

    def run(world_size, **options):
        path = tmp_path / "by_hand.pt"
        target = "by_hand_precision:main"
        numbers = [fork_server.start(target, str(path), rank, world_size, options) for rank in range(world_size)]
        found = fork_server.wait(*numbers)
        for done in found:
            assert done.code == 0, done.output
        return torch.load(path, weights_only=True), int(re.search(r"skipped (\d+)", found[0].output)[1])

    return run


def saved(run, step):
    return torch.load(run.directory.checkpoint(step) / "model.pt", weights_only=True)


@pytest.mark.parametrize(
    ("world_size", "accumulation", "kind"),
    [
        pytest.param(*shape, kind, marks=() if (*shape, kind) in GATE else pytest.mark.nightly)
        for shape in SHAPES
        for kind in KINDS
    ],
)
def test_the_weights_of_a_hand_written_loop(train, by_hand, kind, world_size, accumulation):
    batch, steps = 8, 9
    micro = batch // world_size // accumulation
    scale = OVERFLOWS if accumulation == 1 else 512.0
    # a batch norm over one sample has nothing to normalise
    model = {"dropout": 0.3, "batchnorm": micro > 1}
    expected, skipped = by_hand(world_size, kind=kind, steps=steps, batch=batch, micro=micro, scale=scale, **model)
    code, run, output = train(
        "run",
        *QUIET,
        *SCHEDULE,
        *(f"+task.{name}={value}" for name, value in model.items()),
        f"precision={kind}",
        f"precision.initial_loss_scale={scale}",
        f"trainer.global_batch_size={batch}",
        f"trainer.micro_batch_size={micro}",
        f"trainer.max_steps={steps}",
        world_size=world_size,
    )
    assert code == 0, output
    found = saved(run, steps)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name
    assert run.digest == weights_digest(expected)
    last = next(record for record in reversed(run.metrics) if "train/loss" in record)
    assert last.get("train/skipped_updates", 0) == skipped
    assert (skipped > 0) == (kind.startswith("fp16") and accumulation == 1)


@pytest.mark.parametrize(
    ("kind", "world_size"),
    [
        ("bf16_pure", 1),
        pytest.param("fp16", 2, marks=pytest.mark.nightly),
        pytest.param("fp16_master", 1, marks=pytest.mark.nightly),
        ("fp16_master", 2),
    ],
)
def test_an_interrupted_run_is_the_straight_run(train, kind, world_size):
    words = [
        *QUIET,
        *SCHEDULE,
        *MODEL,
        f"precision={kind}",
        f"precision.initial_loss_scale={OVERFLOWS}",
        "precision.loss_scale_growth_steps=4",
        "trainer.global_batch_size=8",
        "trainer.max_steps=12",
        "trainer.ema_decay=0.9",
        "trainer.clip_grad_norm=0.5",
        "logger.every_steps=3",
    ]
    code, straight, output = train("straight", *words, world_size=world_size)
    assert code == 0, output
    for act in ("0:1:SIGTERM", "0:2:SIGUSR2", ""):
        code, run, output = train("run", *words, world_size=world_size, TRIAL_ACT=act)
        assert code == (4 if act else 0), output
    assert run.digest == straight.digest
    assert run.metrics == straight.metrics
    assert {value.dtype for value in saved(run, 12).values() if value.is_floating_point()} == {
        torch.bfloat16 if kind == "bf16_pure" else torch.float32
    }


@pytest.mark.parametrize(
    "kind", [*(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("fp32", "bf16_pure")), "fp16_master"]
)
def test_averaged_weights_are_evaluated_in_the_runs_own_precision(train, kind):
    words = [
        *QUIET,
        *MODEL,
        f"precision={kind}",
        "trainer.max_steps=5",
        "trainer.ema_decay=0.5",
        "logger.every_steps=1",
    ]
    losses = []
    for name, more in (("averaged", []), ("live", ["trainer.eval_ema=false"])):
        code, run, output = train(name, *words, *more)
        assert code == 0, output
        losses.append([record["eval/loss"] for record in run.metrics if "eval/loss" in record])
    assert len(losses[0]) == len(losses[1])
    assert losses[0] != losses[1]
    assert all(math.isfinite(loss) for loss in losses[0])


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_loss_that_turns_nan_stops_the_run_and_names_the_last_good_checkpoint(train, world_size):
    words = [
        *QUIET,
        "trainer.max_epochs=null",
        "trainer.max_steps=40",
        "logger.every_steps=5",
        "checkpoint.every_steps=4",
        "checkpoint.keep_best=0",
        "checkpoint.asynchronous=false",
    ]
    code, run, output = train("run", *words, world_size=world_size, TRIAL_ACT="0:14:nan")
    assert code == 1, output
    (attempt,) = Ledger(run.directory).attempts()
    assert str(attempt.reason) == "failed"
    assert "the training loss turned NaN between steps 13 and 15" in attempt.detail
    assert f"of step 12: start a new run with init_from={run.directory.checkpoint(12)}" in attempt.detail
    assert run.steps == [4, 8, 12]


def test_weights_that_turned_nan_without_the_loss_are_not_called_good(train):
    words = [
        *QUIET,
        "trainer.max_epochs=null",
        "trainer.max_steps=40",
        "logger.every_steps=20",
        "checkpoint.every_steps=4",
        "checkpoint.keep_best=0",
    ]
    code, run, output = train("run", *words, "checkpoint.asynchronous=false", TRIAL_ACT="0:8:poison")
    assert code == 1, output
    (attempt,) = Ledger(run.directory).attempts()
    assert "turned NaN between steps 9 and 12" in attempt.detail
    assert "of step 4 (of the newer ones, 8, none is)" in attempt.detail


@pytest.mark.nightly
@pytest.mark.parametrize(
    "words",
    [
        [],
        ["precision=bf16"],
        ["parallel=mesh"],
        ["parallel=mesh", "parallel.pipeline_degree=2", "parallel.shard_degree=1", "trainer.micro_batch_size=8"],
    ],
)
def test_weights_that_turn_nan_in_the_last_step_fail_the_run_however_ranks_share_them(train, words):
    words = [*QUIET, "trainer.max_epochs=null", "trainer.max_steps=4", "trainer.global_batch_size=8", *words]
    words += ["checkpoint.every_steps=2", "checkpoint.asynchronous=false"]
    code, run, output = train("run", *words, world_size=2, TRIAL_ACT="0:4:poison,1:4:poison")
    assert code == 1, output
    (attempt,) = Ledger(run.directory).attempts()
    assert "trained weights are NaN or infinite after step 4: 0.bias" in attempt.detail
    assert "the last good checkpoint is of step 2:" in attempt.detail
    assert (str(attempt.reason), run.steps) == ("failed", [2])


def test_a_loss_scale_that_collapses_stops_the_run(train):
    words = [
        *QUIET,
        "precision=fp16",
        "precision.initial_loss_scale=4",
        "trainer.max_epochs=null",
        "trainer.max_steps=40",
        "logger.every_steps=5",
        "checkpoint.keep_best=0",
    ]
    code, run, output = train("run", *words, TRIAL_ACT="0:1:inf")
    assert code == 1, output
    (attempt,) = Ledger(run.directory).attempts()
    assert "the loss scale fell to 0.125 by step 5, below precision.min_loss_scale=1" in attempt.detail
    assert "there is no good checkpoint" in attempt.detail
