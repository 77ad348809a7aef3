"""Ranks of which each has some of the layers train as one device does, survive, and resume on any mesh."""

from __future__ import annotations

import pytest
import torch
from compared_runs import losses, taken, weights

QUIET = ("task=custom", "task._target_=piped.Piped", "logger.tensorboard=false", "checkpoint.keep=100")
SMALL = (*QUIET, "trainer.global_batch_size=16", "trainer.max_steps=20", "logger.every_steps=1", "optimizer.lr=0.01")
SMALL += ("trainer.clip_grad_norm=0.5", "trainer.ema_decay=0.8", "trainer.micro_batch_size=2")
PP = ("parallel=pp",)
INTERLEAVED = (*PP, "parallel.stages_per_rank=2")
PP_FSDP = ("parallel=mesh", "parallel.pipeline_degree=2")
PP_TP = ("parallel=mesh", "parallel.pipeline_degree=2", "parallel.shard_degree=1", "parallel.tensor_degree=2")
ALL = ("parallel=mesh", "parallel.pipeline_degree=2", "parallel.tensor_degree=2", "parallel.shard_degree=2")
HSDP = ("parallel=mesh", "parallel.pipeline_degree=2", "parallel.replicate_degree=2", "parallel.shard_degree=1")
CHAIN = "task._target_=piped.Chain"


def nightly(*values):
    return pytest.param(*values, marks=pytest.mark.nightly)


@pytest.mark.parametrize(
    ("world_size", "words"),
    [
        (2, INTERLEAVED),
        nightly(2, PP),
        nightly(4, PP),
        nightly(3, (*PP, "trainer.micro_batch_size=8")),
        nightly(4, PP_FSDP),
        nightly(4, (*PP_FSDP, "parallel.stages_per_rank=2", "parallel.keep_gradients_whole=true")),
        nightly(4, HSDP),
        nightly(4, PP_TP),
        nightly(8, ALL),
        nightly(2, (*PP, "+task.packed=true", "trainer.activation_checkpointing=[blocks.*]")),
        nightly(2, (*PP, CHAIN)),
        nightly(2, (*INTERLEAVED, CHAIN, "trainer.global_batch_size=10", "trainer.micro_batch_size=5")),
        nightly(2, (*PP, "parallel.stages=[blocks.0]", "trainer.clip_grad_norm=null", "optimizer=sgd")),
        nightly(2, (*PP, "optimizer.groups=[{match:[blocks.*],lr_factor:0.5},{match:[places.*],frozen:true}]")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_the_losses_of_one_device(train, world_size, words):
    """In fp64, so that only mistakes differ: the order of sums changes the last digits."""
    given = [word for word in words if not word.startswith("parallel")]
    code, one, output = train("one", *SMALL, *given)
    assert code == 0, output
    code, run, output = train("run", *SMALL, *words, world_size=world_size)
    assert code == 0, output
    assert losses(run) == pytest.approx(losses(one), rel=1e-10, abs=1e-10)
    norms = [[entry["train/grad_norm"] for entry in each.metrics if "train/grad_norm" in entry] for each in (run, one)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-9)
    for found, expected in zip(weights(run, run.steps[-1]), weights(one, run.steps[-1]), strict=True):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-8, atol=1e-9, msg=name)
    evaluated = [[entry for entry in each.metrics if "eval/loss" in entry] for each in (run, one)]
    assert evaluated[0][-1]["eval/loss"] == pytest.approx(evaluated[1][-1]["eval/loss"], rel=1e-9)
