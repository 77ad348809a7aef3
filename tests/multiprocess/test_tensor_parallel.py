"""Ranks that compute each layer together train as one device does, survive, and resume on any mesh."""

from __future__ import annotations

import pytest
import torch
from compared_runs import losses, weights

QUIET = ("task=custom", "task._target_=divided.Divided", "logger.tensorboard=false", "checkpoint.keep=100")
SMALL = (*QUIET, "trainer.global_batch_size=16", "trainer.max_steps=20", "logger.every_steps=1", "optimizer.lr=0.01")
SMALL += ("trainer.clip_grad_norm=0.5", "trainer.ema_decay=0.8")
TP = ("parallel=tp",)
FSDP_TP = ("parallel=fsdp_tp", "parallel.tensor_degree=2")


def nightly(*values):
    return pytest.param(*values, marks=pytest.mark.nightly)


@pytest.mark.parametrize(
    ("world_size", "words"),
    [
        (2, TP),
        (4, (*FSDP_TP, "trainer.micro_batch_size=2", "trainer.activation_checkpointing=[blocks.*]")),
        nightly(4, TP),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_the_losses_of_one_device(train, world_size, words):
    """In fp64, so that only mistakes differ: the order of sums changes the last digits."""
    given = [word for word in words if not word.startswith(("parallel", "trainer.micro"))]
    code, one, output = train("one", *SMALL, *given)
    assert code == 0, output
    code, run, output = train("run", *SMALL, *words, world_size=world_size)
    assert code == 0, output
    assert losses(run) == pytest.approx(losses(one), rel=1e-10, abs=1e-10)
    norms = [[entry["train/grad_norm"] for entry in each.metrics if "train/grad_norm" in entry] for each in (run, one)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-9)
    for found, expected in zip(weights(run, 20), weights(one, 20), strict=True):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9, msg=name)
    evaluated = [[entry for entry in each.metrics if "eval/loss" in entry] for each in (run, one)]
    assert evaluated[0][-1]["eval/loss"] == pytest.approx(evaluated[1][-1]["eval/loss"], rel=1e-9)
