"""Build the step of a training: a turn for each loss, with the optimizers that step for it, and the average."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hpctrain.config.root import Config
from hpctrain.config.schedule import schedule_of
from hpctrain.config.task_checks import missing_method_error
from hpctrain.config.trainer import Trainer
from hpctrain.errors import ConfigError, TaskError
from hpctrain.metrics.meter import Meter
from hpctrain.parallel.mesh import TrainingWorld
from hpctrain.phrases import listed
from hpctrain.tasks.task import Task
from hpctrain.train.build import Network
from hpctrain.train.build_learning_rate import Span, build_learning_rate
from hpctrain.train.ema import Ema
from hpctrain.train.optimizers import BuiltOptimizer, StateCheck
from hpctrain.train.parameter_groups import ModelNames, ParameterGroup
from hpctrain.train.precision import gradient_scaler
from hpctrain.train.step import FirstMicroBatch, Loss, TrainStep, Turn
from hpctrain.train.task_log import AttachedLog
from hpctrain.train.task_state import TaskState
from hpctrain.train.trained_module import GradientCheck, TrainedModule
from hpctrain.train.update import Clipping, JointUpdate, Update, parameters_of


@dataclass(frozen=True)
class StepBuilder:
    """Builds the step of a training.

    Attributes:
        config: of the run.
        world: the ranks.
        task: computes the losses.
        task_state: of the task.
        task_log: of the task.
        meter: collects the losses.
        network: whose parameters are trained.
        span: of the run.
    """

    config: Config
    world: TrainingWorld
    task: Task
    task_state: TaskState
    task_log: AttachedLog
    meter: Meter
    network: Network
    span: Span

    def build(
        self,
        optimizers: Sequence[BuiltOptimizer],
        first_micro_batch: FirstMicroBatch,
        after_backward: Callable[[JointUpdate], None] | None = None,
    ) -> TrainStep:
        """Build the step, with the replicas for the first step, which send rank zero's weights; collective.

        The turns are in the order in which the configuration names their losses.

        Args:
            optimizers: in the configuration's order.
            first_micro_batch: see `TrainStep`.
            after_backward: called before the updates of each turn; see `JointUpdate`.

        Raises:
            TaskError: the task has no method with the name of a loss.
            ConfigError: a loss trains nothing in the first step, or the task has no `loss`.
        """
        losses = _by_loss(optimizers)
        turns = [
            self._turn(method, group, group[0].settings.name if len(losses) > 1 else "", after_backward)
            for method, group in losses.items()
        ]
        _require_own_rates(optimizers, [update for turn in turns for update in turn.update.updates], self.config)
        ema = self._ema(optimizers)
        step = TrainStep(turns, self.world, first_micro_batch, ema)
        step.build_replicas(0)
        if ema is not None:
            # from the weights that the replicas have sent
            ema.restart()
        return step

    def _turn(
        self,
        function: str,
        optimizers: Sequence[BuiltOptimizer],
        name: str,
        after_backward: Callable[[JointUpdate], None] | None,
    ) -> Turn:
        config, world, network, settings = self.config, self.world, self.network, optimizers[0].settings
        if not settings.name and not callable(self.task.loss):
            raise missing_method_error(config.task["_target_"], function)
        if not callable(getattr(self.task, function, None)):
            raise TaskError(f"{type(self.task).__name__} has no method {function}, which {settings.key}.loss names")
        replica = network.replica
        loss = Loss(
            self.task,
            self.meter,
            self.task_log,
            config.precision.formats,
            world.device,
            function,
            name,
            replica.divides_results,
        )
        module = TrainedModule(network.model, _trained_parameters(network, optimizers, self.span), replica)
        on_host = config.parallel.cpu_offload
        scaler = gradient_scaler(config.precision, world.device, is_mixed=replica.is_mixed, on_host=on_host)
        updates = [self._update(optimizer, scaler) for optimizer in optimizers]
        if scaler is not None:
            _require_parameters(updates)
        update = JointUpdate(updates, self.meter, scaler=scaler, master=network.master, after_backward=after_backward)
        gradients = GradientCheck(loss.method, module, update, config.parallel, world.share)
        return Turn(loss, module, update, gradients, task_state=self.task_state, every_steps=settings.every_steps)

    def _update(self, built: BuiltOptimizer, scaler: torch.amp.GradScaler | None) -> Update:
        settings, optimizer = built.settings, built.optimizer
        if settings.schedule is None:
            schedule, key = self.config.schedule, "schedule"
        else:
            key = f"{settings.key}.schedule"
            schedule = schedule_of(key, settings.schedule)
        span = dataclasses.replace(self.span, every_steps=settings.every_steps)
        rate = build_learning_rate(key, schedule, optimizer, span, base_lr=built.base_lr)
        clipping = Clipping.configured(_clipping_options(self.config.trainer, built), optimizer, self.network.replica)
        return Update(
            optimizer,
            rate,
            name=settings.name,
            clipping=clipping,
            scaler=scaler,
            every_steps=settings.every_steps,
            state_check=StateCheck(optimizer, rate, name=settings.name, warns=self.world.is_rank_zero),
        )

    def _ema(self, optimizers: Sequence[BuiltOptimizer]) -> Ema | None:
        decay = self.config.trainer.ema_decay
        if decay is None:
            return None
        trained = [parameter for built in optimizers for parameter in parameters_of(built.optimizer)]
        return Ema(self.network.module, decay, self.network.master, trained)


def loss_names(optimizers: Sequence[BuiltOptimizer]) -> list[str]:
    """Return the names under which the losses of the turns of every step are logged."""
    losses = [group[0].settings for group in _by_loss(optimizers).values()]
    if len(losses) == 1:
        return ["train/loss"]
    return [f"train/loss/{settings.name}" for settings in losses if settings.every_steps == 1]


def _by_loss(optimizers: Sequence[BuiltOptimizer]) -> dict[str, list[BuiltOptimizer]]:
    """Return the optimizers that step for each loss, by the task's method, in the configuration's order."""
    losses: dict[str, list[BuiltOptimizer]] = {}
    for built in optimizers:
        losses.setdefault(built.settings.loss, []).append(built)
    return losses


def _require_parameters(updates: Sequence[Update]) -> None:
    """Refuse a loss scale where this rank has no parameter of an optimizer: ranks exchange overflows for each.

    Raises:
        TaskError: an optimizer trains nothing on this rank.
    """
    idle = [update for update in updates if all(p.is_meta for p in parameters_of(update.optimizer))]
    if idle:
        names = listed([f"optimizer.named.{update.name}" for update in idle if update.name]) or "the optimizer"
        raise TaskError(
            f"{names} trains no parameter of a stage, which doesn't work with the loss scale of fp16: use "
            "precision=bf16, or cut the model elsewhere (parallel.stages)"
        )


def _require_own_rates(optimizers: Sequence[BuiltOptimizer], updates: Sequence[Update], config: Config) -> None:
    """Refuse named optimizers with rates of their own if the run's schedule sets the same rates for all of them."""
    sharing = {built.settings.name: built for built in optimizers if built.settings.schedule is None}
    overwritten = [update.name for update in updates if update.name in sharing and update.learning_rate.overwrites]
    if len({sharing[name].base_lr for name in overwritten}) > 1:
        key = f"{sharing[overwritten[0]].settings.key}.schedule"
        target = config.schedule["_target_"] if isinstance(config.schedule, Mapping) else None
        problem = "sets the same rates for all optimizers, and so ignores their own"
        raise ConfigError("schedule._target_", target, problem, f"give each optimizer a schedule of its own: {key}")


def _clipping_options(trainer: Trainer, built: BuiltOptimizer) -> Trainer:
    """Return the run's configuration with the optimizer's own bounds of gradients."""
    bounds = {key: getattr(built.settings, key) for key in ("clip_grad_norm", "clip_grad_value")}
    return dataclasses.replace(trainer, **{key: bound for key, bound in bounds.items() if bound is not None})


def _trained_parameters(
    network: Network, optimizers: Sequence[BuiltOptimizer], span: Span
) -> list[tuple[nn.Parameter, int]]:
    """Return the parameters that a turn trains, as the computing model has them, each with its first step.

    Raises:
        ConfigError: it trains none in the first step.
    """
    computing = ModelNames(network.model).parameters if network.master is not None else {}
    trained_from = [
        (computing.get(name, parameter), _unfreeze_step(group, span))
        for built in optimizers
        for group in built.groups
        if not group.frozen
        for name, parameter in group.parameters.items()
    ]
    if all(step for _, step in trained_from):
        raise _all_frozen_error([group for built in optimizers for group in built.groups])
    return trained_from


def _unfreeze_step(group: ParameterGroup, span: Span) -> int:
    entry = group.entry
    if entry is None:
        return 0
    if (epoch := entry.unfreeze_at_epoch) is not None:
        steps = span.epoch_for(f"{entry.key}.unfreeze_at_epoch", epoch, "use unfreeze_at_step")
        return max(1, round(epoch * steps))
    return entry.unfreeze_at_step or 0


def _all_frozen_error(groups: Sequence[ParameterGroup]) -> ConfigError:
    entry = next(group.entry for group in groups if group.entry is not None and not group.frozen)
    name = "unfreeze_at_step" if entry.unfreeze_at_step is not None else "unfreeze_at_epoch"
    problem = "until then, all parameters are frozen"
    return ConfigError(f"{entry.key}.{name}", getattr(entry, name), problem, "train something from the first step on")
