"""Build a model that the ranks of a mesh share."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import nn

from hpctrain.checkpoint.warm_start import warm_start
from hpctrain.config.root import Config
from hpctrain.errors import ConfigError
from hpctrain.parallel.blocks import find_blocks
from hpctrain.parallel.freed_memory import return_freed_memory
from hpctrain.parallel.replica import synchronise_batchnorm
from hpctrain.parallel.sharding import shard_model
from hpctrain.rank.compiler import compile_in_place
from hpctrain.rank.mesh import Mesh
from hpctrain.rank.world import World
from hpctrain.tasks.task import Task
from hpctrain.train.activation_checkpointing import checkpoint_activations
from hpctrain.train.build import Network, build_model
from hpctrain.train.build_pipeline import cut_into_stages, join_pipeline
from hpctrain.train.initial_values import build_on_rank_zero, give_memory, send_values
from hpctrain.train.modes import begin_training
from hpctrain.train.parameter_groups import freeze
from hpctrain.train.precision import compute_in, dtype_of, poor_fit, set_fp32_precision
from hpctrain.train.rank_comparison import SAME_MODEL, require_same_model

SAME_ON_META = f"{SAME_MODEL}, ranks above 0 on torch's meta device"

log = logging.getLogger("hpctrain.train")


def build_sharded_network(
    config: Config, task: Task, world: World, mesh: Mesh, *, fresh: bool = False, leave_saved: bool = False
) -> Network:
    """Build the model, and shard it over the mesh, in its precision; collective.

    Args:
        config: of the run.
        task: makes the model if the configuration has none.
        world: the ranks.
        mesh: of the ranks.
        fresh: start from the weights of `config.init_from`, if it is set; every rank reads its own shards.
        leave_saved: leave what a checkpoint contains without values, until it is loaded; the same on every rank.
    """
    formats, trainer = config.precision.formats, config.trainer
    set_fp32_precision(formats)
    if world.is_rank_zero and (remark := poor_fit(formats, world.device)):
        log.warning(remark)
    if world.device.type == "cpu":
        return_freed_memory()
    model, values = build_on_rank_zero(partial(_build, config, task, mesh), world)
    _refuse_keras(model)
    freeze(config.optimizer, model)
    require_same_model(model, world, SAME_ON_META)
    if mesh.shape.tensor > 1:
        # importing the styles of tensor parallelism takes time
        from hpctrain.parallel.tensor_parallel import divide, find_plan

        # before anything wraps modules, since the plan has their names
        divide(model, find_plan(model, task, mesh.shape.tensor), mesh.tensor_mesh)
    stages = None
    if mesh.neighbours is not None:
        # as above: names are those of the plan
        stages = cut_into_stages(model, task, config.parallel, mesh.neighbours, is_logged=world.is_rank_zero)
    if begin_training(model) and world.is_rank_zero:
        log.info("the model was built in evaluation mode: calling train() on it and all its modules")
    if (dtype := dtype_of(formats.model)) is not None:
        compute_in(dtype, model, given=torch.float32)
    if trainer.activation_checkpointing:
        found = checkpoint_activations(model, trainer.activation_checkpointing, compiled=trainer.compile)
        if stages is not None:
            stages.require_whole(found)
    if trainer.compile:
        # a whole model would be traced through the collectives that gather its blocks
        for block in find_blocks(model, config.parallel.blocks or task.blocks).values() or [model]:
            compile_in_place(block, trainer.compile_mode)
    root = shard_model(
        model,
        mesh,
        config.parallel,
        blocks=task.blocks,
        ignored=() if stages is None else stages.absent_parameters(),
        compute_dtype=dtype_of(formats.autocast),
        # sums of half-precision gradients over many ranks would lose digits
        reduce_dtype=torch.float32 if formats.autocast or formats.model else None,
        is_logged=world.is_rank_zero,
    )
    home = torch.device("cpu") if config.parallel.cpu_offload else world.device
    with nullcontext() if stages is None else stages.absent_set_aside():
        give_memory(root, model, home, of_buffers=world.device)
    # only the tensors themselves: a hook may save something else in their place
    saved = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()} if leave_saved else set()
    send_values(values, model, world, without=saved)
    if fresh and config.init_from is not None:
        warm_start(model, Path(config.init_from), match=config.init_match, strict=config.init_strict)
    root.settle()
    pipeline = None if stages is None else join_pipeline(root, stages, model, config, world)
    return Network(model, model, None, root, pipeline)


def _build(config: Config, task: Task, mesh: Mesh) -> nn.Module:
    model = build_model(config.model, task)
    if config.trainer.sync_batchnorm:
        model = synchronise_batchnorm(model, mesh.same_stages)
    dtype = dtype_of(config.precision.formats.model)
    return model if dtype is None else model.to(dtype)


def _refuse_keras(model: nn.Module) -> None:
    # by name: importing the class imports Keras
    if any(kind.__name__ == "KerasModule" for module in model.modules() for kind in type(module).__mro__):
        problem = "replaces weights by shards, and Keras keeps variables of its own with whole weights"
        raise ConfigError("parallel.kind", "mesh", problem, "use parallel=ddp")
