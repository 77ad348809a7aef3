"""Build the task, the model and the optimizer from their configuration; errors of a user's own code pass through."""

from __future__ import annotations

import importlib
import inspect
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpctrain.checkpoint.warm_start import warm_start
from hpctrain.config.optimizer import HANDLING_KEYS, Handling, handling_of
from hpctrain.config.root import Config
from hpctrain.config.target import NEEDS_A_CLOSURE
from hpctrain.distributed.compiler import compile_in_place
from hpctrain.distributed.replica import broadcast_tensors, inner, replicate, synchronise_batchnorm
from hpctrain.distributed.world import World
from hpctrain.errors import ConfigError, TaskError
from hpctrain.tasks.task import Task
from hpctrain.train.activation_checkpointing import checkpoint_activations
from hpctrain.train.modes import begin_training
from hpctrain.train.precision import (
    MASTER_TYPES,
    PURE_TYPES,
    MasterWeights,
    compute_in,
    order_channels_last,
    poor_fit,
    set_matmul_precision,
)

log = logging.getLogger("hpctrain.train")


def locate(key: str, target: str) -> Any:
    """Import the object that an import path names.

    Raises:
        ConfigError: the module or the name in it doesn't exist; an error inside the module passes through.
    """
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


def build_task(node: Mapping[str, Any]) -> Task:
    """Build the task.

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
        TaskError: the result isn't a module.
    """
    model = task.build_model() if node["_target_"] is None else instantiate("model", node)
    if not isinstance(model, nn.Module):
        raise TaskError(f"the model must be a torch.nn.Module, but is a {type(model).__name__}")
    return model


@dataclass(frozen=True, slots=True)
class Network:
    """The model in its two roles, which are one object in most precisions.

    Attributes:
        module: holds the weights that are optimized, averaged and saved; not wrapped.
        model: the replica that the task calls in training; evaluation calls the module inside it (`inner`).
        master: copies between the two if `module` isn't inside `model`.
    """

    module: nn.Module
    model: nn.Module
    master: MasterWeights | None


def build_network(config: Config, task: Task, world: World, *, fresh: bool = False) -> Network:
    """Build the model, put it on its devices and wrap it as configured; collective.

    Args:
        config: of the run.
        task: makes the model if the configuration has none, and places it if a process has several devices.
        world: the ranks.
        fresh: start from the weights of `config.init_from`, if it is set. Rank zero reads them; `replicate` sends them
            to the other ranks.
    """
    # The order matters. Batch norms are replaced before anything refers to them. The half copy is made on the device
    # and in its memory format: it would never see a weight that is moved later. Whatever changes a forward pass comes
    # before the compiler, and the compiler before DDP.
    trainer, kind = config.trainer, config.precision.kind
    set_matmul_precision(kind)
    if world.is_rank_zero and (remark := poor_fit(kind, world.device)):
        log.warning(remark)
    module = build_model(config.model, task)
    if trainer.sync_batchnorm:
        module = synchronise_batchnorm(module)
    if fresh and config.init_from is not None and world.is_rank_zero:
        warm_start(module, Path(config.init_from), match=config.init_match, strict=config.init_strict)
    spreads = len(world.devices) > 1 and config.parallel.kind == "ddp"
    module = task.place(module, world.devices) if spreads else module.to(world.device)
    # before the half copy is made, which has the modes of the original
    if begin_training(inner(module)) and world.is_rank_zero:
        log.info("the model was built in evaluation mode: calling train() on it and all its modules")
    if trainer.channels_last:
        order_channels_last(module)
    called, master = _in_precision(module, kind, world)
    if trainer.activation_checkpointing:
        checkpoint_activations(called, trainer.activation_checkpointing, compiled=trainer.compile)
    if trainer.compile:
        compile_in_place(called, trainer.compile_mode)
    return Network(module, replicate(called, world, config.parallel), master)


def _in_precision(module: nn.Module, kind: str, world: World) -> tuple[nn.Module, MasterWeights | None]:
    """Return the module for forward passes, and the link to its fp32 weights if these are separate."""
    if kind in PURE_TYPES:
        module.to(PURE_TYPES[kind])
        compute_in(PURE_TYPES[kind], module, given=torch.float32)
    if kind not in MASTER_TYPES:
        return module, None
    # DDP broadcasts only the copy's weights, and the fp32 ones have to be equal on all ranks, too
    broadcast_tensors([*module.parameters(), *module.buffers()], world)
    master = MasterWeights(module, MASTER_TYPES[kind])
    compute_in(MASTER_TYPES[kind], master.copy, given=torch.float32)
    return master.copy, master


def build_optimizer(node: Mapping[str, Any], model: nn.Module, global_batch_size: int) -> torch.optim.Optimizer:
    """Build the optimizer over the parameters that require a gradient; each group's `initial_lr` is the scaled rate.

    Args:
        node: of the configuration; keys of `Handling` are hpctrain's own, and not passed to the class.
        model: whose parameters are trained.
        global_batch_size: scales the learning rate if `lr_scaling` asks for it.

    Raises:
        TaskError: no parameter requires a gradient, or the class isn't an optimizer.
        ConfigError: its step needs a closure.
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not named:
        raise TaskError("no parameter of the model requires a gradient: there is nothing to train")
    handling = handling_of(node)
    options = {key: value for key, value in node.items() if key not in HANDLING_KEYS}
    trained = _groups(named) if handling.no_decay_norm_bias else [parameter for _, parameter in named]
    optimizer = instantiate("optimizer", options, trained)
    target = node["_target_"]
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TaskError(f"optimizer._target_={target} made a {type(optimizer).__name__}, not an optimizer")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError("optimizer._target_", target, NEEDS_A_CLOSURE, "choose another class of torch.optim")
    factor = _learning_rate_scale(handling, global_batch_size)
    for group in optimizer.param_groups:
        # two entries: the schedule overwrites `lr` in each step, and needs the rate that it starts from
        group["lr"] = group["initial_lr"] = group["lr"] if factor == 1 else group["lr"] * factor
    return optimizer


def _learning_rate_scale(handling: Handling, global_batch_size: int) -> float:
    ratio = global_batch_size / handling.lr_base_batch_size
    return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[handling.lr_scaling]


def _groups(named: Sequence[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    """Split parameters into those with weight decay and those without: fewer than two dimensions, or named bias."""
    spared = [parameter for name, parameter in named if parameter.ndim < 2 or name.rpartition(".")[2] == "bias"]
    ids = {id(parameter) for parameter in spared}
    groups: list[dict[str, Any]] = [
        {"params": [parameter for _, parameter in named if id(parameter) not in ids]},
        {"params": spared, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
