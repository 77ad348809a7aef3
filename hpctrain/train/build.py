"""Build the task and the model from their configuration; errors of a user's own code pass through."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hpctrain.checkpoint.saver import CheckpointSaver
from hpctrain.checkpoint.warm_start import warm_start
from hpctrain.config.checkpoint import Checkpoint
from hpctrain.config.optimizer import losses_of, named_optimizers
from hpctrain.config.precision import NumberFormats
from hpctrain.config.root import Config
from hpctrain.config.target import find_own
from hpctrain.config.task_checks import call_mismatch_error, called_methods, missing_method_error, warnings_about
from hpctrain.data.micro_batch import iterate_tensors
from hpctrain.errors import ConfigError, TaskError
from hpctrain.parallel.ddp import broadcast_tensors, build_whole_replica, synchronise_batchnorm
from hpctrain.parallel.mesh import Mesh, TrainingWorld
from hpctrain.parallel.replica import Replica, inner
from hpctrain.phrases import listed
from hpctrain.rank.compiler import compile_in_place, compile_parts_in_place
from hpctrain.rank.stop_request import StopRequest
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Claim
from hpctrain.tasks.task import Task
from hpctrain.train.activation_checkpointing import checkpoint_activations
from hpctrain.train.modes import begin_training
from hpctrain.train.parameter_groups import freeze
from hpctrain.train.precision import (
    MasterWeights,
    compute_in,
    dtype_of,
    order_channels_last,
    set_fp32_precision,
    slow_precision_reason,
)
from hpctrain.train.rank_comparison import SAME_MODEL, require_same_model

if TYPE_CHECKING:
    from hpctrain.parallel.pipeline.stages import Stages

SAME_ON_META = f"{SAME_MODEL}, ranks above 0 on torch's meta device"

log = logging.getLogger("hpctrain.train")


def locate(key: str, target: str) -> Any:
    """Import the object that an import path names.

    Raises:
        ConfigError: the module or the name in it doesn't exist; an error inside the module passes through.
    """
    if (maker := find_own(target)) is not None:
        return maker
    parts = target.split(".")
    for split in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:split])
        try:
            symbol: Any = importlib.import_module(name)
        except ModuleNotFoundError as error:
            # if this module is missing, the rest of the path may be attributes; else one of its own imports failed
            if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
                continue
            raise
        for attribute in parts[split:]:
            if not hasattr(symbol, attribute):
                raise ConfigError(f"{key}._target_", target, f"{name} has no {attribute}", "check the spelling")
            symbol = getattr(symbol, attribute)
        return symbol
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
            f"{listed(lazy, max_names=4)} {'has' if len(lazy) == 1 else 'have'} no shape before the first forward "
            "pass, as in nn.LazyLinear: run one in build_model, with inputs such as torch.zeros(1, 3, 224, 224), "
            "before returning the model"
        )
    return model


@dataclass(frozen=True, slots=True)
class Network:
    """The model in its two roles, which are one object in most precisions, and what the ranks share of it.

    Attributes:
        module: holds the weights that are optimized, averaged and saved; not wrapped.
        model: the module that forward passes go through; not wrapped.
        master: copies between the two if they aren't the same.
        replica: of `model`.
        saver: makes what saves the training, from the run's directory, the attempt's claim, the policy and its stop.
    """

    module: nn.Module
    model: nn.Module
    master: MasterWeights | None
    replica: Replica
    saver: Callable[[RunDirectory, Claim, Checkpoint, StopRequest], CheckpointSaver] = CheckpointSaver


def build_network(config: Config, task: Task, world: TrainingWorld, *, resumes: bool = False) -> Network:
    """Build the model, put it on its devices and in its precision, and choose its replica; collective.

    The choice isn't made in `hpctrain.parallel`: building needs checkpoints, tasks and data, which lie above it.

    Args:
        config: of the run.
        task: makes the model if the configuration has none, and places it if a process has several devices.
        world: the ranks.
        resumes: whether the run has a checkpoint. Then a mesh leaves out initial values that the checkpoint contains;
            otherwise the run starts from the weights of `config.init_from`, if that is set.
    """
    formats = config.precision.formats
    set_fp32_precision(formats)
    if world.is_rank_zero and (remark := slow_precision_reason(formats, world.device)):
        log.warning(remark)
    if world.mesh is not None:
        return _build_shared(config, task, world, world.mesh, resumes=resumes)
    return _build_whole(config, task, world, resumes=resumes)


def _build_whole(config: Config, task: Task, world: TrainingWorld, *, resumes: bool) -> Network:
    # The order matters. Batch norms are replaced before anything refers to them. The half copy is made on the device
    # and in its memory format: it would never see a weight that is moved later. Whatever changes a forward pass comes
    # before the compiler, and the compiler before DDP.
    trainer = config.trainer
    module = build_model(config.model, task)
    if trainer.sync_batchnorm:
        module = synchronise_batchnorm(module)
    if not resumes and config.init_from is not None and world.is_rank_zero:
        # DDP sends them to the other ranks
        warm_start(module, Path(config.init_from), match=config.init_match, strict=config.init_strict)
    # before the half copy is made, which knows what is trained
    freeze(config.optimizer, module)
    require_same_model(module, world)
    spreads = len(world.devices) > 1 and config.parallel.kind == "ddp"
    module = task.place(module, world.devices) if spreads else module.to(world.device)
    # before the half copy is made, which has the modes of the original
    _begin_training(inner(module), world)
    if trainer.channels_last:
        order_channels_last(module)
    called, master = _in_precision(module, config.precision.formats, world)
    if trainer.activation_checkpointing:
        checkpoint_activations(called, trainer.activation_checkpointing, compiled=trainer.compile)
    if trainer.compile:
        # with several losses, the task calls parts of the model
        several = len(losses_of(named_optimizers(config.optimizer))) > 1
        (compile_parts_in_place if several else compile_in_place)(called, trainer.compile_mode)
    replica = build_whole_replica(called, world, config.parallel)
    return Network(module, called, master, replica, partial(CheckpointSaver, is_rank_zero=world.is_rank_zero))


def _begin_training(model: nn.Module, world: TrainingWorld) -> None:
    if begin_training(model) and world.is_rank_zero:
        log.info("the model was built in evaluation mode: calling train() on it and all its modules")


def _build_shared(config: Config, task: Task, world: TrainingWorld, mesh: Mesh, *, resumes: bool) -> Network:
    # they import torch's DTensor, which takes half a second
    from hpctrain.checkpoint.sharded.write import ShardedSaver
    from hpctrain.parallel.blocks import find_blocks
    from hpctrain.parallel.fsdp import FsdpReplica, return_freed_memory, shard_model
    from hpctrain.train.initial_values import build_on_rank_zero, give_memory, send_values

    formats, trainer = config.precision.formats, config.trainer
    if world.device.type == "cpu":
        return_freed_memory()
    model, values = build_on_rank_zero(partial(_build_for_mesh, config, task, mesh), world)
    _refuse_keras(model)
    freeze(config.optimizer, model)
    require_same_model(model, world, SAME_ON_META)
    stages = _divide_model(model, task, config, mesh, world)
    _begin_training(model, world)
    if (dtype := dtype_of(formats.model)) is not None:
        compute_in(dtype, model, outer_dtype=torch.float32)
    if trainer.activation_checkpointing:
        recomputed = checkpoint_activations(model, trainer.activation_checkpointing, compiled=trainer.compile)
        if stages is not None:
            stages.require_whole(recomputed)
    if trainer.compile:
        # a whole model would be traced through the collectives that gather its blocks
        for block in find_blocks(model, config.parallel.blocks or task.blocks).values() or [model]:
            compile_in_place(block, trainer.compile_mode)
    root = shard_model(
        model,
        mesh,
        config.parallel,
        block_names=task.blocks,
        ignored=() if stages is None else stages.absent_parameters(),
        compute_dtype=dtype_of(formats.autocast),
        # sums of half-precision gradients over many ranks would lose digits
        reduce_dtype=torch.float32 if formats.autocast or formats.model else None,
        is_logged=world.is_rank_zero,
    )
    home = torch.device("cpu") if config.parallel.cpu_offload else world.device
    with nullcontext() if stages is None else stages.absent_set_aside():
        give_memory(root, model, home, of_buffers=world.device)
    send_values(values, model, world, without=_restored_later(config, model) if resumes else ())
    if not resumes and config.init_from is not None:
        # each rank reads its own shards
        warm_start(model, Path(config.init_from), match=config.init_match, strict=config.init_strict)
    root.fix_sharding()
    replica = FsdpReplica(root, world, config.parallel)
    if stages is not None:
        from hpctrain.parallel.pipeline.replica import join_pipeline

        replica = join_pipeline(root, stages, config, world, _shapes_of)
    return Network(model, model, None, replica, partial(ShardedSaver, world=world, copies=replica.copies))


def _divide_model(model: nn.Module, task: Task, config: Config, mesh: Mesh, world: TrainingWorld) -> Stages | None:
    """Divide layers among ranks, and then the model into the stages of a pipeline; return these, if there are any."""
    if mesh.shape.tensor > 1:
        # importing the styles of tensor parallelism takes time
        from hpctrain.parallel.tensor_parallel import divide, find_plan

        # before anything wraps modules, since the plan has their names
        divide(model, find_plan(model, task, mesh.shape.tensor), mesh.tensor_mesh)
    if mesh.neighbours is None:
        return None
    from hpctrain.parallel.pipeline.replica import cut_into_stages

    # as above: names are those of the plan
    return cut_into_stages(model, task, config.parallel, mesh.neighbours, is_logged=world.is_rank_zero)


def _shapes_of(batch: Any) -> tuple[tuple[int, ...], ...]:
    """The shapes of a batch's tensors, in the order of `iterate_tensors`.

    Raises:
        TaskError: it has no tensors.
    """
    shapes = tuple(tuple(tensor.shape) for tensor in iterate_tensors(batch))
    if not shapes:
        raise TaskError(
            f"in a pipeline, batches must hold tensors, and this one is a {type(batch).__name__} without any: make "
            "them in the dataset, or in collate_fn"
        )
    return shapes


def _restored_later(config: Config, model: nn.Module) -> set[int]:
    """Return the ids of what a checkpoint contains, and needs no initial values; the same ones on every rank."""
    # the constructor of a user's own optimizer may copy the initial values
    if not all(
        optimizer.node["_target_"].startswith("torch.optim.") for optimizer in named_optimizers(config.optimizer)
    ):
        return set()
    # only the tensors themselves: a hook may save something else in their place
    return {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}


def _build_for_mesh(config: Config, task: Task, mesh: Mesh) -> nn.Module:
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


def _in_precision(
    module: nn.Module, formats: NumberFormats, world: TrainingWorld
) -> tuple[nn.Module, MasterWeights | None]:
    """Return the module for forward passes, and the link to its fp32 weights if these are separate."""
    if (dtype := dtype_of(formats.model)) is not None:
        module.to(dtype)
        compute_in(dtype, module, outer_dtype=torch.float32)
    if (half := dtype_of(formats.copy)) is None:
        return module, None
    # DDP broadcasts only the copy's weights, and the fp32 ones have to be equal on all ranks, too
    broadcast_tensors([*module.parameters(), *module.buffers()], world)
    master = MasterWeights(module, half)
    compute_in(half, master.copy, outer_dtype=torch.float32)
    return master.copy, master


def check_class(kind: type[Task], target: str, losses: Sequence[str]) -> None:
    """Check the methods of a task, and log a warning about those that look like mistakes.

    Args:
        kind: its class.
        target: as the configuration names it.
        losses: its methods that compute losses, as the configuration names them.

    Raises:
        ConfigError: it lacks a method, or has one that can't be called.
    """
    for method in sorted(kind.__abstractmethods__):
        raise missing_method_error(target, method)
    calls = called_methods(losses)
    task_classes = [base for base in kind.__mro__ if issubclass(base, Task) and base is not Task]
    methods = {
        name: value for base in task_classes for name, value in vars(base).items() if isinstance(value, FunctionType)
    }
    for name, arguments in calls.items():
        if name in methods and isinstance(method := inspect.getattr_static(kind, name), FunctionType):
            try:
                # the decorator's own signature: it may pass the method more arguments than it gets
                inspect.signature(method, follow_wrapped=False).bind("self", *arguments)
            except TypeError as error:
                raise call_mismatch_error("task", target, name, arguments, str(error)) from None
    for line in warnings_about(target, methods, calls.keys() | set(_mentioned_in_class(kind))):
        log.warning("%s", line)


def _mentioned_in_class(kind: type[Task]) -> Iterator[str]:
    for base in kind.__mro__:
        for value in () if base is Task else vars(base).values():
            for function in _functions(value):
                yield from _mentioned(function.__code__)


def _functions(value: object) -> Iterator[FunctionType]:
    """Yield the plain functions in what a class defines, below their decorators."""
    if isinstance(value, property):
        parts: Sequence[object] = (value.fget, value.fset, value.fdel)
    elif isinstance(value, cached_property):
        parts = (value.func,)
    elif isinstance(value, staticmethod | classmethod):
        parts = (value.__func__,)
    else:
        parts = (value,)
    for part in parts:
        if isinstance(part, FunctionType) and isinstance(inner := inspect.unwrap(part), FunctionType):
            yield inner


def _mentioned(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inside in code.co_consts:
        if isinstance(inside, CodeType):
            yield from _mentioned(inside)
