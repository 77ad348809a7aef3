"""Build the learning rates of one optimizer from the schedule of the configuration."""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from hpctrain.config.schedule import AnySchedule, Plateau, Schedule
from hpctrain.config.target import NEEDS_THE_METRIC
from hpctrain.errors import ConfigError
from hpctrain.phrases import counted
from hpctrain.train.build import instantiate, locate
from hpctrain.train.learning_rate import Factor, LearningRate, PlateauLearningRate, learning_rate_factor

MAX_TRIED = 1000
"""Steps, spread over the run, for which a schedule of one's own is called before the first one."""
ROUNDING = 1e-9
"""A factor of the learning rate this little below 0 is a rounding error, as a cosine has at its last step."""


@dataclass(frozen=True, slots=True)
class Span:
    """Length of a run, and the metric that judges it, as schedules need them.

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
        parameters: Mapping[str, inspect.Parameter] = inspect.signature(maker).parameters
    except (TypeError, ValueError):  # a function or class without a signature
        parameters = {}
    # a scheduler is stepped once per update, and a function of the step gets steps of the run
    every_steps = span.every_steps if "optimizer" in parameters else 1
    num_updates = max(1, span.total_steps // every_steps)
    provided = {"optimizer": optimizer, "total_steps": num_updates}
    if (epoch := _epoch_given(key, node, parameters.get("steps_per_epoch"), span)) is not None:
        # rounded up: OneCycleLR refuses steps after its last one
        provided["steps_per_epoch"] = math.ceil(epoch / every_steps)
    # OneCycleLR has two ways to give its length, and the configured one counts
    if "epochs" in node:
        del provided["total_steps"]
    # a scheduler of torch may overwrite their rates; one that is a tensor is changed in place
    groups = [{**group, "lr": float(group["lr"])} for group in optimizer.param_groups]
    schedule = instantiate(key, {**{name: value for name, value in provided.items() if name in parameters}, **node})
    if isinstance(schedule, ReduceLROnPlateau):
        raise ConfigError(f"{key}._target_", target, *NEEDS_THE_METRIC)
    if isinstance(schedule, LRScheduler):
        if getattr(schedule, "optimizer", optimizer) is not optimizer:
            problem = "made a scheduler of another optimizer than the one that it was given"
            raise ConfigError(f"{key}._target_", target, problem, "pass on its argument optimizer")
        if isinstance(schedule, OneCycleLR) and schedule.total_steps < num_updates:
            problem = f"ends after {counted(schedule.total_steps, 'update')}, but the run has {num_updates:,}"
            raise ConfigError(
                f"{key}._target_", target, problem, "leave out its total_steps, epochs and steps_per_epoch"
            )
        rate = TorchLearningRate(optimizer, schedule, groups, base_lr)
        if rate.ignores_groups:
            problem = "sets one rate for all groups, and so ignores the groups' own (lr_factor, layer_decay, lr)"
            remedy = "give its rates as lists with an item per group, in their proportions, or use schedule=one_cycle"
            raise ConfigError(f"{key}._target_", target, problem, remedy)
        return rate
    if not callable(schedule):
        problem = f"made a {type(schedule).__name__}, expected a function of the step, or a scheduler of torch"
        raise ConfigError(f"{key}._target_", target, problem, "return a function: step -> factor of the learning rate")
    factor = _checked_factor(key, target, schedule)
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


def _checked_factor(key: str, target: str, function: Callable[[int], Any]) -> Factor:
    """Return the function, and have it refuse a result that isn't a finite number of at least 0."""

    def factor(step: int) -> float:
        value = function(step)
        # a negative rate would climb the loss
        if isinstance(value, Real) and math.isfinite(value) and float(value) > -ROUNDING:
            return max(0.0, float(value))
        description = value if isinstance(value, Real) else f"a {type(value).__name__}"
        problem = f"its function returned {description} for step {step}, expected a finite number of at least 0"
        raise ConfigError(f"{key}._target_", target, problem, "return the factor of the learning rate as a float")

    return factor


log = logging.getLogger("hpctrain.train")


class TorchLearningRate(LearningRate):
    """Rates, and perhaps momenta, that a scheduler of torch sets after each update.

    Args:
        optimizer: whose rates are set.
        scheduler: over this optimizer, before its first step.
        groups: copies of the optimizer's groups, as they were without the scheduler.
        base_lr: as in the base class.

    Attributes:
        ignores_groups: whether the groups have different rates, and the scheduler replaces them by rates in other
            proportions.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: LRScheduler,
        groups: Sequence[Mapping[str, Any]],
        base_lr: float | None = None,
    ) -> None:
        rates = [float(group.get("initial_lr", group["lr"])) for group in groups]
        super().__init__(optimizer, lambda _: 1.0, rates[0] if base_lr is None else base_lr)
        self._scheduler = scheduler
        self._fresh = copy.deepcopy(scheduler.state_dict())
        scheduled_rates = [[float(group["initial_lr"]) for group in optimizer.param_groups]]
        scheduled_rates += [[float(rate) for rate in getattr(scheduler, name, ())] for name in ("base_lrs", "max_lrs")]
        self.overwrites = any(chosen and chosen != rates for chosen in scheduled_rates)
        differ = len(set(rates)) > 1
        self.ignores_groups = differ and any(chosen and not _proportional(chosen, rates) for chosen in scheduled_rates)
        self._base_rates = rates
        self._options = [
            {name: copy.deepcopy(value) for name, value in group.items() if name not in before}
            for group, before in zip(optimizer.param_groups, groups, strict=True)
        ]
        self._first_rates = [group["lr"] for group in optimizer.param_groups]

    def begin(self, update: int) -> None:  # noqa: ARG002 - the scheduler counts
        """Keep the rates, which the scheduler has set."""
        rate, base = self._optimizer.param_groups[0]["lr"], self._base_rates[0]
        self.current = rate if base == self._base_lr else rate * self._base_lr / base

    def after_update(self) -> None:
        """Step the scheduler."""
        self._scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the rates, and what the updates have changed in the scheduler and its options of the groups.

        What they haven't changed comes from the configuration, also if that is changed on a resume.
        """
        now, groups = self._scheduler.state_dict(), self._optimizer.param_groups
        changed = {name: value for name, value in now.items() if not _same(value, self._fresh.get(name))}
        return {
            "kind": type(self._scheduler).__name__,
            "changed": changed,
            "rates": [group["lr"] for group in groups],
            "base_rates": self._base_rates,
            "options": [
                {name: group[name] for name, value in fresh.items() if not _same(group[name], value)}
                for group, fresh in zip(groups, self._options, strict=True)
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a result of `state_dict`; a base rate that the configuration changed scales the rate."""
        groups = self._optimizer.param_groups
        continues = state.get("kind") == type(self._scheduler).__name__
        # the optimizer's state has the options of the scheduler that was saved
        changed = state.get("options") if continues else None
        for group, fresh, saved in zip(groups, self._options, changed or [{}] * len(groups), strict=True):
            group.update(copy.deepcopy({**fresh, **saved}))
        if not continues:
            log.warning("the checkpoint has no state of %s: it starts now", type(self._scheduler).__name__)
            for group, rate in zip(groups, self._first_rates, strict=True):
                group["lr"] = rate
            return
        rates = zip(groups, self._base_rates, state["rates"], state["base_rates"], strict=True)
        for group, base, rate, base_before in rates:
            group["lr"] = rate if self.overwrites or base == base_before else rate * base / base_before
        self._restore_scheduler({**self._fresh, **state["changed"]})

    def _restore_scheduler(self, state: Mapping[str, Any]) -> None:
        scheduler = self._scheduler
        scheduler.load_state_dict(copy.deepcopy(dict(state)))
        # these two compute rates and momenta from the count alone: their configuration may be another one
        if type(scheduler) in (OneCycleLR, CyclicLR) and scheduler.last_epoch > 0:
            scheduler.last_epoch -= 1
            with contextlib.suppress(ValueError):  # the run is longer already than the curve
                scheduler.step()
            scheduler.load_state_dict(copy.deepcopy(dict(state)))


def _proportional(rates: Sequence[float], expected: Sequence[float]) -> bool:
    pairs = zip(rates, expected, strict=False)
    return len(rates) == len(expected) and all(
        math.isclose(rate * expected[0], rates[0] * reference, rel_tol=1e-6) for rate, reference in pairs
    )


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and torch.equal(first, second)
    if isinstance(first, list | tuple):
        return type(first) is type(second) and len(first) == len(second) and all(map(_same, first, second))
    if isinstance(first, dict):
        return (
            isinstance(second, dict)
            and first.keys() == second.keys()
            and all(_same(first[k], second[k]) for k in first)
        )
    return bool(first == second)
