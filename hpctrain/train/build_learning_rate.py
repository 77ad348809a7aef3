"""Build the learning rates of one optimizer from the schedule of the configuration."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from hpctrain.config.schedule import AnySchedule, Plateau, Schedule
from hpctrain.config.target import NEEDS_THE_METRIC
from hpctrain.errors import ConfigError
from hpctrain.phrases import counted
from hpctrain.train.build import instantiate, locate
from hpctrain.train.learning_rate import LearningRate, PlateauLearningRate
from hpctrain.train.schedule import Factor, learning_rate_factor
from hpctrain.train.torch_learning_rate import GroupsBefore, TorchLearningRate

MAX_TRIED = 1000
"""Steps, spread over the run, for which a schedule of one's own is called before the first one."""
ROUNDING = 1e-9
"""A factor of the learning rate this little below 0 is a rounding error, as a cosine has at its last step."""


@dataclass(frozen=True, slots=True)
class Span:
    """What a schedule may need to know of its run.

    Attributes:
        total_steps: the last step of the run.
        steps_per_epoch: steps of a pass over the training data; None if these have no length.
        metric: name of the metric that judges the run.
        mode: `min` or `max`; None if it isn't defined which values are better.
        every_steps: steps from one update to the next.
    """

    total_steps: int
    steps_per_epoch: int | None
    metric: str = "loss"
    mode: str | None = "min"
    every_steps: int = 1

    def epoch_for(self, key: str, value: object, remedy: str) -> int:
        """Return the steps of an epoch, for a key that counts in epochs.

        Args:
            key: full name of the key.
            value: of the key.
            remedy: what to set instead, for data without a length.

        Raises:
            ConfigError: the training data have no length, so a resume with another `max_steps` would have other epochs.
        """
        if self.steps_per_epoch is None:
            raise ConfigError(key, value, "counts in epochs, but the training data have no length", remedy)
        return self.steps_per_epoch


def build_learning_rate(
    key: str, schedule: AnySchedule, optimizer: torch.optim.Optimizer, span: Span, *, base_lr: float | None = None
) -> LearningRate:
    """Build the learning rates of one optimizer.

    Args:
        key: full name of the schedule's group, for errors: `schedule`, or a named optimizer's.
        schedule: of the configuration (`schedule_of`).
        optimizer: from `build_optimizer`.
        span: of the run.
        base_lr: the optimizer's rate at the factor 1, for the log; None for that of its first group.

    Raises:
        ConfigError: it isn't defined which values of the run's metric are better, or its class or function isn't a
            schedule; the message names the key.
    """
    if isinstance(schedule, Schedule):
        factor = learning_rate_factor(schedule, span.total_steps, _epoch_for(key, schedule, span))
        return LearningRate(optimizer, factor, base_lr)
    if isinstance(schedule, Plateau):
        if span.mode is None:
            problem = f"the task doesn't define which values of {span.metric} are better"
            remedy = "set it to min or max, or checkpoint.metric to a metric whose mode is known, such as loss"
            raise ConfigError("checkpoint.metric_mode", None, problem, remedy)
        return PlateauLearningRate(
            optimizer,
            schedule,
            metric=span.metric,
            mode=span.mode,
            steps_per_epoch=_epoch_for(key, schedule, span),
            base_lr=base_lr,
            key=f"{key}.kind",
        )
    return _custom(key, schedule, optimizer, span, base_lr)


def _epoch_for(key: str, schedule: Schedule | Plateau, span: Span) -> int:
    """Return the steps of an epoch for a schedule; 1 if none of its keys counts in epochs."""
    for epochs, steps in {
        "warmup_epochs": "warmup_steps",
        "drop_at_epochs": "drop_at_steps",
        "decay_epochs": "decay_steps",
    }.items():
        if value := getattr(schedule, epochs, None):
            return span.epoch_for(f"{key}.{epochs}", value, f"use {key}.{steps}")
    return 1


def _custom(
    key: str, node: Mapping[str, Any], optimizer: torch.optim.Optimizer, span: Span, base_lr: float | None
) -> LearningRate:
    target = node["_target_"]
    maker = locate(key, target)
    try:
        taken: Mapping[str, inspect.Parameter] = inspect.signature(maker).parameters
    except (TypeError, ValueError):  # a function or class without a signature
        taken = {}
    # a scheduler is stepped once per update, and a function of the step gets steps of the run
    every_steps = span.every_steps if "optimizer" in taken else 1
    num_updates = max(1, span.total_steps // every_steps)
    provided = {"optimizer": optimizer, "total_steps": num_updates}
    if (epoch := _epoch_given(key, node, taken.get("steps_per_epoch"), span)) is not None:
        # rounded up: OneCycleLR refuses steps after its last one
        provided["steps_per_epoch"] = math.ceil(epoch / every_steps)
    # OneCycleLR has two ways to give its length, and the configured one counts
    if "epochs" in node:
        del provided["total_steps"]
    before = GroupsBefore.of(optimizer)
    made = instantiate(key, {**{name: value for name, value in provided.items() if name in taken}, **node})
    if isinstance(made, ReduceLROnPlateau):
        raise ConfigError(f"{key}._target_", target, *NEEDS_THE_METRIC)
    if isinstance(made, LRScheduler):
        if getattr(made, "optimizer", optimizer) is not optimizer:
            problem = "made a scheduler of another optimizer than the one that it was given"
            raise ConfigError(f"{key}._target_", target, problem, "pass on its argument optimizer")
        if isinstance(made, OneCycleLR) and made.total_steps < num_updates:
            problem = f"ends after {counted(made.total_steps, 'update')}, but the run has {num_updates:,}"
            raise ConfigError(
                f"{key}._target_", target, problem, "leave out its total_steps, epochs and steps_per_epoch"
            )
        rate = TorchLearningRate(optimizer, made, before, base_lr)
        if rate.ignores_groups and len(set(before.rates)) > 1:
            problem = "sets one rate for all groups, and so ignores the groups' own (lr_factor, layer_decay, lr)"
            remedy = "give its rates as lists with an item per group, in their proportions, or use schedule=one_cycle"
            raise ConfigError(f"{key}._target_", target, problem, remedy)
        return rate
    if not callable(made):
        problem = f"made a {type(made).__name__}, expected a function of the step, or a scheduler of torch"
        raise ConfigError(f"{key}._target_", target, problem, "return a function: step -> factor of the learning rate")
    factor = _checked(key, target, made)
    _try_out(factor, span.total_steps)
    return LearningRate(optimizer, factor, base_lr)


def _try_out(factor: Factor, total_steps: int) -> None:
    """Call a function of the step for steps of the whole run, so that a mistake shows before the first one."""
    for step in range(0, total_steps, max(1, total_steps // MAX_TRIED)):
        factor(step)
    factor(max(0, total_steps - 1))


def _epoch_given(key: str, node: Mapping[str, Any], argument: inspect.Parameter | None, span: Span) -> int | None:
    """Return the steps of an epoch that a custom schedule gets; None for its own default."""
    if argument is None or "steps_per_epoch" in node:
        return None
    if "epochs" in node:
        return span.epoch_for(f"{key}.epochs", node["epochs"], f"use {key}.total_steps, or set {key}.steps_per_epoch")
    if argument.default is argument.empty:
        return span.epoch_for(f"{key}._target_", node["_target_"], f"set {key}.steps_per_epoch")
    return span.steps_per_epoch


def _checked(key: str, target: str, function: Callable[[int], Any]) -> Factor:
    """Return the function, and have it refuse a result that isn't a finite number of at least 0."""

    def factor(step: int) -> float:
        value = function(step)
        # a negative rate would climb the loss
        if isinstance(value, Real) and math.isfinite(value) and float(value) > -ROUNDING:
            return max(0.0, float(value))
        found = value if isinstance(value, Real) else f"a {type(value).__name__}"
        problem = f"its function returned {found} for step {step}, expected a finite number of at least 0"
        raise ConfigError(f"{key}._target_", target, problem, "return the factor of the learning rate as a float")

    return factor
