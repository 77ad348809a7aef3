"""The FLOPs of a model that is compiled, found by two samples that go through it as it was before."""

from __future__ import annotations

import logging
import random

import torch

from hpctrain.data.loader import MicroBatch
from hpctrain.data.tree import map_tensors
from hpctrain.distributed.replica import inner
from hpctrain.distributed.world import World
from hpctrain.train.profiling.flops import FlopCount
from hpctrain.train.step import TrainStep

SAMPLES = 2
"""Batch norm wants more than one."""

log = logging.getLogger("hpctrain.train")


def is_compiled(step: TrainStep) -> bool:
    """Whether the model, or a part of it, goes through torch's compiler, which hides the operators."""
    return any(
        part._compiled_call_impl is not None
        or hasattr(part, "_orig_mod")
        or hasattr(part.forward, "_torchdynamo_orig_callable")
        for part in step.model.modules()
    )


def flops_by_trial(step: TrainStep, micro_batch: MicroBatch, world: World) -> float | None:
    """FLOPs per sample, forward and backward; None where the trial fails.

    Weights, buffers, gradients and random state stay as they are. To be called by all ranks, since a task's loss may
    hold collectives of its own.

    Args:
        step: of the training.
        micro_batch: whose first samples are taken.
        world: the ranks.
    """
    model = inner(step.model)
    few = min(SAMPLES, micro_batch.num_samples)
    if not few:
        return None
    batch = map_tensors(
        lambda tensor: tensor[:few] if tensor.ndim and len(tensor) == micro_batch.num_samples else tensor,
        micro_batch.batch,
    )
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    random_state = random.getstate()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        eager = torch.compiler.set_stance("force_eager")
        with eager, torch.random.fork_rng(list(world.gpus)), FlopCount() as count:
            loss = step.loss(micro_batch._replace(batch=batch, num_samples=few), model)
            torch.autograd.grad(loss, parameters, allow_unused=True)
    except Exception as error:  # whatever a user's code makes of two samples, it isn't worth the run
        log.info("FLOPs are not counted: %s samples alone don't go through the model (%s)", few, error)
        return None
    finally:
        random.setstate(random_state)
        with torch.no_grad():
            for buffer, saved in buffers:
                buffer.copy_(saved)
    return (count.total or 0) / few or None
