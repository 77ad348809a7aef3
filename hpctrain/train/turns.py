"""Build the turns of a step: one for each loss, with the optimizers that step for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import nn

from hpctrain.config.root import Config
from hpctrain.config.schedule import schedule_of
from hpctrain.config.task_methods import lacks
from hpctrain.config.trainer import Trainer
from hpctrain.distributed.replica import replicate_for_loss
from hpctrain.distributed.world import World
from hpctrain.errors import ConfigError, TaskError
from hpctrain.metrics.meter import Meter
from hpctrain.tasks.task import Task
from hpctrain.train.build import Network
from hpctrain.train.build_learning_rate import Span, build_learning_rate
from hpctrain.train.joint_update import JointUpdate
from hpctrain.train.loss import Loss
from hpctrain.train.optimizers import BuiltOptimizer
from hpctrain.train.parameter_groups import ModelNames, ParameterGroup
from hpctrain.train.precision import gradient_scaler
from hpctrain.train.task_log import AttachedLog
from hpctrain.train.task_state import TaskState
from hpctrain.train.trained_module import TrainedModule
from hpctrain.train.turn import Turn
from hpctrain.train.update import Clipping, Update


def build_turns(
    config: Config,
    task: Task,
    network: Network,
    optimizers: Sequence[BuiltOptimizer],
    meter: Meter,
    *,
    task_log: AttachedLog,
    task_state: TaskState,
    world: World,
    span: Span,
) -> list[Turn]:
    """Build the turns in the order in which the configuration names their losses; their replicas come later.

    Args:
        config: of the run.
        task: computes the losses.
        network: whose parameters the optimizers train.
        optimizers: in the configuration's order.
        meter: collects the losses.
        task_log: of the task.
        task_state: of the task.
        world: the ranks.
        span: of the run.

    Raises:
        TaskError: the task has no method of that name.
        ConfigError: a loss trains nothing at first, or the task has none.
    """
    losses = _by_loss(optimizers)
    turns = []
    for method, own in losses.items():
        name = own[0].named.name if len(losses) > 1 else ""
        if not own[0].named.name and not callable(task.loss):
            raise lacks(config.task["_target_"], method)
        if not callable(getattr(task, method, None)):
            raise TaskError(f"{type(task).__name__} has no method {method}, which {own[0].named.key}.loss names")
        loss = Loss(
            task,
            meter,
            task_log,
            precision=config.precision.formats,
            device=world.device,
            method=method,
            name=name,
            makes_whole=world.tensor_size > 1,
        )
        module = TrainedModule(
            network.model, _trained_from(network, own, span), replicate=_replicate(network, config, world)
        )
        # the ranks have different parameters, or share them in different ways
        is_mixed = world.tensor_size > 1 or world.pipeline_size > 1
        on_host = config.parallel.cpu_offload
        scaler = gradient_scaler(config.precision, world.device, is_shared=is_mixed, on_host=on_host)
        updates = [_update(config, each, scaler, span, network, is_mixed=is_mixed) for each in own]
        update = JointUpdate(updates, meter, scaler=scaler, master=network.master)
        every_steps, pipeline = own[0].named.every_steps, network.pipeline
        if pipeline is None:
            turns.append(Turn(loss, module, update, every_steps=every_steps))
            continue
        # it imports torch's DTensor, which takes half a second
        from hpctrain.train.pipelined_turn import PipelinedTurn

        turns.append(
            PipelinedTurn(
                loss,
                module,
                update,
                pipeline=pipeline,
                task_log=task_log,
                task_state=task_state,
                every_steps=every_steps,
            )
        )
    _require_own_rates(optimizers, [update for turn in turns for update in turn.update.updates], config)
    return turns


def _replicate(network: Network, config: Config, world: World) -> Callable[[nn.Module], nn.Module]:
    if (sharded := network.sharded) is not None:
        return lambda _: sharded
    return partial(replicate_for_loss, world=world, parallel=config.parallel)


def loss_names(optimizers: Sequence[BuiltOptimizer]) -> list[str]:
    """Return the names under which the losses of the turns of every step are logged."""
    losses = [own[0].named for own in _by_loss(optimizers).values()]
    if len(losses) == 1:
        return ["train/loss"]
    return [f"train/loss/{named.name}" for named in losses if named.every_steps == 1]


def _by_loss(optimizers: Sequence[BuiltOptimizer]) -> dict[str, list[BuiltOptimizer]]:
    """Return the optimizers that step for each loss, by the task's method, in the configuration's order."""
    losses: dict[str, list[BuiltOptimizer]] = {}
    for each in optimizers:
        losses.setdefault(each.named.loss, []).append(each)
    return losses


def _update(
    config: Config,
    built: BuiltOptimizer,
    scaler: torch.amp.GradScaler | None,
    span: Span,
    network: Network,
    *,
    is_mixed: bool,
) -> Update:
    named, optimizer = built.named, built.optimizer
    if named.schedule is None:
        schedule, key = config.schedule, "schedule"
    else:
        key = f"{named.key}.schedule"
        schedule = schedule_of(key, named.schedule)
    return Update(
        optimizer,
        build_learning_rate(
            key,
            schedule,
            optimizer,
            dataclasses.replace(span, every_steps=named.every_steps),
            base_lr=built.base_lr,
        ),
        name=named.name,
        clipping=Clipping.configured(
            _bounds(config.trainer, built), optimizer, is_mixed=is_mixed, pipeline=network.pipeline
        ),
        scaler=scaler,
        every_steps=named.every_steps,
    )


def _require_own_rates(optimizers: Sequence[BuiltOptimizer], updates: Sequence[Update], config: Config) -> None:
    """Refuse rates of named optimizers that the schedule of the run would overwrite by the same ones."""
    sharing = {each.named.name: each for each in optimizers if each.named.schedule is None}
    overwritten = [update.name for update in updates if update.name in sharing and update.learning_rate.overwrites]
    if len({sharing[name].base_lr for name in overwritten}) > 1:
        key = f"{sharing[overwritten[0]].named.key}.schedule"
        target = config.schedule["_target_"] if isinstance(config.schedule, Mapping) else None
        problem = "sets the same rates for all optimizers, and so ignores their own"
        raise ConfigError("schedule._target_", target, problem, f"give each optimizer a schedule of its own: {key}")


def _bounds(trainer: Trainer, built: BuiltOptimizer) -> Trainer:
    """Return the run's configuration with the optimizer's own bounds of gradients."""
    norm, value = built.named.clip_grad_norm, built.named.clip_grad_value
    return dataclasses.replace(
        trainer,
        clip_grad_norm=trainer.clip_grad_norm if norm is None else norm,
        clip_grad_value=trainer.clip_grad_value if value is None else value,
    )


def _trained_from(network: Network, optimizers: Sequence[BuiltOptimizer], span: Span) -> list[tuple[nn.Parameter, int]]:
    """Return the parameters that a turn trains, of the model that computes, and the step from which it does.

    Raises:
        ConfigError: it trains none in the first step.
    """
    computing = ModelNames(network.model).parameters if network.master is not None else {}
    trained_from = [
        (computing.get(name, parameter), _since(group, span))
        for each in optimizers
        for group in each.groups
        if not group.frozen
        for name, parameter in group.parameters.items()
    ]
    if all(step for _, step in trained_from):
        raise _all_frozen([group for each in optimizers for group in each.groups])
    return trained_from


def _since(group: ParameterGroup, span: Span) -> int:
    entry = group.entry
    if entry is None:
        return 0
    if (epoch := entry.unfreeze_at_epoch) is not None:
        steps = span.epoch_for(f"{entry.key}.unfreeze_at_epoch", epoch, "use unfreeze_at_step")
        return max(1, round(epoch * steps))
    return entry.unfreeze_at_step or 0


def _all_frozen(groups: Sequence[ParameterGroup]) -> ConfigError:
    entry = next(group.entry for group in groups if group.entry is not None and not group.frozen)
    name = "unfreeze_at_step" if entry.unfreeze_at_step is not None else "unfreeze_at_epoch"
    problem = "until then, all parameters are frozen"
    return ConfigError(f"{entry.key}.{name}", getattr(entry, name), problem, "train something from the first step on")
