"""Build a model that the ranks of a mesh share."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from hpctrain.checkpoint.warm_start import warm_start
from hpctrain.config.root import Config
from hpctrain.distributed.blocks import find_blocks
from hpctrain.distributed.compiler import compile_in_place
from hpctrain.distributed.freed_memory import return_freed_memory
from hpctrain.distributed.local_part import local_part
from hpctrain.distributed.mesh import Mesh
from hpctrain.distributed.replica import synchronise_batchnorm
from hpctrain.distributed.sharding import ShardedLossModule, send_buffers, shard_model
from hpctrain.distributed.world import World
from hpctrain.errors import ConfigError
from hpctrain.tasks.task import Task
from hpctrain.train.activation_checkpointing import checkpoint_activations
from hpctrain.train.build import Network, build_model
from hpctrain.train.build_pipeline import cut_into_stages, join_pipeline
from hpctrain.train.deferred_values import DeferredValues, deferred_values
from hpctrain.train.modes import begin_training
from hpctrain.train.parameter_groups import freeze
from hpctrain.train.precision import compute_in, dtype_of, poor_fit, set_fp32_precision
from hpctrain.train.rank_comparison import require_same_model

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
        leave_saved: leave out the initial values of what a checkpoint contains; the same on every rank.
    """
    formats, trainer = config.precision.formats, config.trainer
    set_fp32_precision(formats)
    if world.is_rank_zero and (remark := poor_fit(formats, world.device)):
        log.warning(remark)
    if world.device.type == "cpu":
        return_freed_memory()
    build = partial(_build, config, task, mesh)
    model, values = deferred_values(build)
    _refuse_keras(model)
    freeze(config.optimizer, model)
    require_same_model(model, world)
    if mesh.shape.tensor > 1:
        # importing the styles of tensor parallelism takes time
        from hpctrain.distributed.tensor_parallel import divide, find_plan

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
    with nullcontext() if stages is None else stages.absent_set_aside():
        _give_memory(config, root, model, values, world, leave_saved=leave_saved)
    if fresh and config.init_from is not None:
        warm_start(model, Path(config.init_from), match=config.init_match, strict=config.init_strict)
    _make_alike(root, model, mesh)
    pipeline = None if stages is None else join_pipeline(root, stages, model, config, world)
    fill_rest = partial(_fill_rest, values, root, model, mesh) if values is not None and leave_saved else None
    return Network(model, model, None, root, pipeline, fill_rest)


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


def _give_memory(
    config: Config,
    root: ShardedLossModule,
    model: nn.Module,
    values: DeferredValues | None,
    world: World,
    *,
    leave_saved: bool,
) -> None:
    """Put the shards and buffers of a model where they belong, with their values."""
    offloads = config.parallel.cpu_offload
    if values is not None:
        home = torch.device("cpu") if offloads else world.device
        values.fill(root, model, home, of_buffers=world.device, leave_saved=leave_saved)
    elif not offloads:
        model.to(world.device)
    # otherwise FSDP2 has moved the buffers, and only these


def _fill_rest(values: DeferredValues, root: ShardedLossModule, model: nn.Module, mesh: Mesh) -> None:
    """Compute the values that no checkpoint has provided; collective."""
    values.fill_rest()
    _make_alike(root, model, mesh)


def _make_alike(root: ShardedLossModule, model: nn.Module, mesh: Mesh) -> None:
    """Give all replicas the weights of the first one, and ranks with the same stages equal buffers; collective."""
    root.settle()
    if mesh.shape.replicate > 1:
        group = mesh.device_mesh.get_group("replicate")
        with torch.no_grad():
            for parameter in model.parameters():
                if not parameter.is_meta:
                    dist.broadcast(local_part(parameter.detach()), group=group, group_src=0)
    send_buffers(model, mesh.same_stages)
