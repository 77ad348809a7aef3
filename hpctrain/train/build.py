"""Build the task and the model from their configuration; errors of a user's own code pass through."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hpctrain.checkpoint.warm_start import warm_start
from hpctrain.config.main_module import find_own
from hpctrain.config.named_optimizers import losses_of, named_optimizers
from hpctrain.config.precision import NumberFormats
from hpctrain.config.root import Config
from hpctrain.errors import ConfigError, TaskError
from hpctrain.parallel.replica import broadcast_tensors, inner, synchronise_batchnorm
from hpctrain.phrases import listed
from hpctrain.rank.compiler import compile_in_place, compile_parts_in_place
from hpctrain.rank.world import World
from hpctrain.tasks.task import Task
from hpctrain.train.activation_checkpointing import checkpoint_activations
from hpctrain.train.modes import begin_training
from hpctrain.train.parameter_groups import freeze
from hpctrain.train.precision import (
    MasterWeights,
    compute_in,
    dtype_of,
    order_channels_last,
    poor_fit,
    set_fp32_precision,
)
from hpctrain.train.rank_comparison import require_same_model
from hpctrain.train.task_class import check_class

if TYPE_CHECKING:
    # importing it imports torch's DTensor, which takes half a second
    from hpctrain.parallel.pipeline.pipeline import Pipeline
    from hpctrain.parallel.sharding import ShardedLossModule

log = logging.getLogger("hpctrain.train")


def locate(key: str, target: str) -> Any:
    """Import the object that an import path names.

    Raises:
        ConfigError: the module or the name in it doesn't exist; an error inside the module passes through.
    """
    if (own := find_own(target)) is not None:
        return own
    parts = target.split(".")
    for split in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:split])
        try:
            found: Any = importlib.import_module(name)
        except ModuleNotFoundError as error:
            # if this module is missing, the rest of the path may be attributes; else one of its own imports failed
            if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
                continue
            raise
        for attribute in parts[split:]:
            if not hasattr(found, attribute):
                raise ConfigError(f"{key}._target_", target, f"{name} has no {attribute}", "check the spelling")
            found = getattr(found, attribute)
        return found
    raise ConfigError(f"{key}._target_", target, f"no module named {parts[0]}", "check the spelling, or install it")


def instantiate(key: str, node: Mapping[str, Any], *arguments: Any) -> Any:
    """Call the object that ``_target_`` names with the other keys; inner nodes with a ``_target_`` are built first."""
    options = {
        name: instantiate(f"{key}.{name}", value) if isinstance(value, Mapping) and "_target_" in value else value
        for name, value in node.items()
        if name != "_target_"
    }
    return locate(key, node["_target_"])(*arguments, **options)


def build_trained_task(config: Config) -> Task:
    """Build the task of a run that trains it, and check its methods.

    Raises:
        TaskError: the class isn't a `Task`.
        ConfigError: it lacks a method, or has one that can't be called.
    """
    target, losses = config.task["_target_"], losses_of(named_optimizers(config.optimizer))
    kind = locate("task", target)
    if isinstance(kind, type) and issubclass(kind, Task):
        check_class(kind, target, losses)
    task = build_task(config.task)
    if not isinstance(kind, type):  # a function that makes a task
        check_class(type(task), target, losses)
    return task


def build_task(node: Mapping[str, Any]) -> Task:
    """Build the task, whatever methods it has: a run may have trained an earlier version of it.

    Raises:
        TaskError: the class isn't a `Task`.
    """
    task = instantiate("task", node)
    if not isinstance(task, Task):
        raise TaskError(
            f"task._target_={node['_target_']} made a {type(task).__name__}: derive it from hpctrain.tasks.Task"
        )
    return task


def build_model(node: Mapping[str, Any], task: Task) -> nn.Module:
    """Build the configured model, or the task's own.

    Raises:
        TaskError: the result isn't a module, or has parameters without a shape.
    """
    model = task.build_model() if node["_target_"] is None else instantiate("model", node)
    if not isinstance(model, nn.Module):
        raise TaskError(f"the model must be a torch.nn.Module, but is a {type(model).__name__}")
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if lazy := [name for name, tensor in tensors.items() if is_lazy(tensor)]:
        raise TaskError(
            f"{listed(lazy, shown=4)} {'has' if len(lazy) == 1 else 'have'} no shape before the first forward pass, as "
            "in nn.LazyLinear: run one in build_model, with inputs such as torch.zeros(1, 3, 224, 224), before "
            "returning the model"
        )
    return model


@dataclass(frozen=True, slots=True)
class Network:
    """The model in its two roles, which are one object in most precisions.

    Attributes:
        module: holds the weights that are optimized, averaged and saved; not wrapped.
        model: the module that forward passes go through; not wrapped.
        master: copies between the two if they aren't the same.
        sharded: the replica of a model that the ranks of a mesh share; None if each rank has a replica to build.
        pipeline: this rank's part in a pipeline; None without one.
    """

    module: nn.Module
    model: nn.Module
    master: MasterWeights | None
    sharded: ShardedLossModule | None = None
    pipeline: Pipeline | None = None


def build_network(config: Config, task: Task, world: World, *, fresh: bool = False) -> Network:
    """Build the model, and put it on its devices and in its precision; collective.

    Args:
        config: of the run.
        task: makes the model if the configuration has none, and places it if a process has several devices.
        world: the ranks.
        fresh: start from the weights of `config.init_from`, if it is set. Rank zero reads them; `replicate` sends them
            to the other ranks later.
    """
    # The order matters. Batch norms are replaced before anything refers to them. The half copy is made on the device
    # and in its memory format: it would never see a weight that is moved later. Whatever changes a forward pass comes
    # before the compiler, and the compiler before DDP.
    trainer, formats = config.trainer, config.precision.formats
    set_fp32_precision(formats)
    if world.is_rank_zero and (remark := poor_fit(formats, world.device)):
        log.warning(remark)
    module = build_model(config.model, task)
    if trainer.sync_batchnorm:
        module = synchronise_batchnorm(module)
    if fresh and config.init_from is not None and world.is_rank_zero:
        warm_start(module, Path(config.init_from), match=config.init_match, strict=config.init_strict)
    # before the half copy is made, which knows what is trained
    freeze(config.optimizer, module)
    require_same_model(module, world)
    spreads = len(world.devices) > 1 and config.parallel.kind == "ddp"
    module = task.place(module, world.devices) if spreads else module.to(world.device)
    # before the half copy is made, which has the modes of the original
    if begin_training(inner(module)) and world.is_rank_zero:
        log.info("the model was built in evaluation mode: calling train() on it and all its modules")
    if trainer.channels_last:
        order_channels_last(module)
    called, master = _in_precision(module, formats, world)
    if trainer.activation_checkpointing:
        checkpoint_activations(called, trainer.activation_checkpointing, compiled=trainer.compile)
    if trainer.compile:
        # with several losses, the task calls parts of the model
        several = len(losses_of(named_optimizers(config.optimizer))) > 1
        (compile_parts_in_place if several else compile_in_place)(called, trainer.compile_mode)
    return Network(module, called, master)


def _in_precision(module: nn.Module, formats: NumberFormats, world: World) -> tuple[nn.Module, MasterWeights | None]:
    """Return the module for forward passes, and the link to its fp32 weights if these are separate."""
    if (dtype := dtype_of(formats.model)) is not None:
        module.to(dtype)
        compute_in(dtype, module, given=torch.float32)
    if (half := dtype_of(formats.copy)) is None:
        return module, None
    # DDP broadcasts only the copy's weights, and the fp32 ones have to be equal on all ranks, too
    broadcast_tensors([*module.parameters(), *module.buffers()], world)
    master = MasterWeights(module, half)
    compute_in(half, master.copy, given=torch.float32)
    return master.copy, master
