"""Losses and gradients are weighted by what was trained on: those of a loop over whole batches, to rounding."""

from __future__ import annotations

import itertools

import pytest
import torch

from hpctrain.checkpoint.read import load
from hpctrain.checkpoint.stored_tensor import whole_tensors
from tests.multiprocess.programs.weighed import SAMPLES, expected, is_readable

STEPS, BATCH = 9, 12
TRAINING = (
    "task=custom",
    "trainer.max_epochs=null",
    f"trainer.max_steps={STEPS}",
    f"trainer.global_batch_size={BATCH}",
    "data.shuffle=false",
    "optimizer.lr=0.01",
    "schedule=constant",
    "logger.every_steps=1",
    "logger.tensorboard=false",
    "checkpoint.keep=100",
)
NAMED = (
    "optimizer=named",
    'optimizer.named.first={_target_: torch.optim.AdamW, lr: 0.01, match: "0.*", loss: first_loss}',
    'optimizer.named.second={_target_: torch.optim.AdamW, lr: 0.01, match: "[12].*", loss: second_loss}',
)


def weights_of(run):
    return {name: whole_tensors(value) for name, value in load(run.directory.checkpoint(STEPS)).model.items()}


def require_close(run, weights, losses):
    for name, value in weights_of(run).items():
        torch.testing.assert_close(value, weights[name], rtol=1e-9, atol=1e-11, msg=name)
    logged = [record.get("train/loss") for record in run.metrics if "train/epoch" in record]
    assert logged == [loss if loss is None else pytest.approx(loss, rel=1e-10) for loss in losses]


def shapes():
    """Every kind, world size, micro-batch size and option; those outside of the gate are nightly."""
    gate = [("Samples", 2, 6, "plain"), ("Tokens", 1, 3, "turns")]
    every = itertools.product(("Samples", "Tokens"), (1, 2, 4), (1, 3, 6, 12), ("plain", "clip", "turns"))
    fitting = [each for each in every if each[1] * each[2] <= BATCH]
    return [each if each in gate else pytest.param(*each, marks=pytest.mark.nightly) for each in fitting]


OPTIONS = {"plain": {}, "clip": {"clip": 0.05}, "turns": {"named": True}}


@pytest.mark.parametrize(("kind", "world_size", "micro", "option"), shapes())
def test_weights_and_losses_are_those_of_whole_batches(train, kind, world_size, micro, option):
    options = OPTIONS[option]
    weights, losses = expected(kind, STEPS, BATCH, **options)
    words = [f"trainer.clip_grad_norm={options.get('clip', 'null')}", *(NAMED if options.get("named") else ())]
    code, run, output = train(
        "run",
        *TRAINING,
        f"task._target_=tests.multiprocess.programs.weighed.{kind}",
        f"trainer.micro_batch_size={micro}",
        *words,
        world_size=world_size,
    )
    assert code == 0, output
    require_close(run, weights, losses)


SHARED = {
    "fsdp": (2, ("parallel=fsdp",)),
    "fsdp of 4": (4, ("parallel=fsdp", "trainer.clip_grad_norm=0.05")),
    "hsdp": (4, ("parallel=mesh", "parallel.replicate_degree=2")),
    "whole gradients": (2, ("parallel=fsdp", "parallel.keep_gradients_whole=true")),
    "recomputed": (2, ("parallel=fsdp", "trainer.activation_checkpointing=['*']")),
    "tp": (2, ("parallel=tp",)),
    "pp": (2, ("parallel=pp", "trainer.clip_grad_norm=0.05")),
    "pp and fsdp": (4, ("parallel=mesh", "parallel.pipeline_degree=2")),
}


@pytest.mark.nightly
@pytest.mark.parametrize("micro", [3, 6])
@pytest.mark.parametrize("kind", ["Samples", "Tokens"])
@pytest.mark.parametrize("shared", SHARED)
def test_ranks_that_share_the_model(train, kind, micro, shared):
    world_size, words = SHARED[shared]
    if micro * world_size > BATCH and shared != "tp" and "pp" not in shared:
        micro = 1
    clip = 0.05 if any("clip" in word for word in words) else None
    weights, losses = expected(kind, STEPS, BATCH, clip=clip)
    task = (f"task._target_=tests.multiprocess.programs.weighed.{kind}", f"trainer.micro_batch_size={micro}")
    code, run, output = train("run", *TRAINING, *task, *words, world_size=world_size)
    assert code == 0, output
    require_close(run, weights, losses)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["Samples", "Tokens"])
@pytest.mark.parametrize("precision", ["bf16", "bf16_pure", "fp16", "fp16_master"])
def test_half_precision(train, kind, precision):
    """Gradients are as large as those of a mean: no update is skipped."""
    _, losses = expected(kind, STEPS, BATCH)
    task = (
        f"task._target_=tests.multiprocess.programs.weighed.{kind}",
        "+task.dtype=float32",
        f"precision={precision}",
        "precision.initial_loss_scale=1024",
    )
    for world_size, micro in ((1, 12), (1, 3), (2, 3), (2, 1)):
        name, words = f"run{world_size}{micro}", (*TRAINING, *task, f"trainer.micro_batch_size={micro}")
        code, run, output = train(name, *words, world_size=world_size)
        assert code == 0, output
        records = [record for record in run.metrics if "train/epoch" in record]
        assert [record.get("train/loss") for record in records] == [
            loss if loss is None else pytest.approx(loss, rel=0.02) for loss in losses
        ]
        assert not any(record.get("train/skipped_updates") for record in records)


@pytest.mark.nightly
@pytest.mark.parametrize("words", [(), ("parallel=fsdp",), ("data.num_workers=1",)], ids=["ddp", "fsdp", "workers"])
@pytest.mark.parametrize("kind", ["Samples", "Tokens"])
def test_an_interrupted_run_is_the_straight_run(train, kind, words):
    words = (
        *TRAINING,
        "logger.every_steps=4",
        "trainer.micro_batch_size=3",
        f"task._target_=tests.multiprocess.programs.weighed.{kind}",
        *words,
    )
    code, straight, output = train("straight", *words, world_size=2)
    assert code == 0, output
    for stop in ("2", "3", "4", ""):
        code, run, output = train("run", *words, world_size=2, WEIGHED_STOP=stop or "0")
        assert code == (4 if stop else 0), output
    assert len(run.attempts) == 4
    assert (run.digest, run.metrics) == (straight.digest, straight.metrics)
    seen = [load(each.directory.checkpoint(STEPS)).state["samples_seen"] for each in (run, straight)]
    readable = sum(is_readable(index % SAMPLES) for index in range(STEPS * BATCH))
    assert seen == [readable if kind == "Samples" else STEPS * BATCH] * 2


@pytest.mark.nightly
def test_one_rank_whose_weights_can_vary_makes_all_exchange_theirs(train):
    words = (
        *TRAINING,
        "task._target_=tests.multiprocess.programs.weighed.OnOneRank",
        "trainer.micro_batch_size=3",
        "trainer.max_steps=2",
    )
    code, run, output = train("run", *words, world_size=2)
    assert code == 0, output
    # rank zero has its six samples, and rank 1 half of each micro-batch
    assert load(run.directory.checkpoint(2)).state["samples_seen"] == 2 * (6 + 2)
    assert "a step's batches hold 8 of its 12 samples" in output


def test_a_rank_without_samples_doesnt_leave_the_others_alone_in_the_pass_that_counts_flops(ranks):
    for process in ranks("few_samples:counted", world_size=2):
        assert process.code == 0, process.output
        of_two, of_one, of_none = process.result
        assert of_two == of_one > 0
        assert of_none is None
