"""Losses and gradients are weighted by what was trained on: those of a loop over whole batches, to rounding."""

from __future__ import annotations

import itertools

import pytest
import torch
from weighed import expected

from hpctrain.checkpoint.read import load
from hpctrain.checkpoint.sharded.read import whole_tensors

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


def shapes(*gate):
    every = [
        (kind, size, micro)
        for kind, size, micro in itertools.product(("Samples", "Tokens"), (1, 2, 4), (1, 3, 6, 12))
        if size * micro <= BATCH
    ]
    return [each if each in gate else pytest.param(*each, marks=pytest.mark.nightly) for each in every]


@pytest.mark.parametrize("options", [{}, {"clip": 0.05}, {"named": True}], ids=["plain", "clip", "turns"])
@pytest.mark.parametrize(("kind", "world_size", "micro"), shapes())
def test_weights_and_losses_are_those_of_whole_batches(train, kind, world_size, micro, options):
    weights, losses = expected(kind, STEPS, BATCH, **options)
    words = [f"trainer.clip_grad_norm={options.get('clip', 'null')}", *(NAMED if options.get("named") else ())]
    code, run, output = train(
        "run",
        *TRAINING,
        f"task._target_=weighed.{kind}",
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
    task = (f"task._target_=weighed.{kind}", f"trainer.micro_batch_size={micro}")
    code, run, output = train("run", *TRAINING, *task, *words, world_size=world_size)
    assert code == 0, output
    require_close(run, weights, losses)
