"""The learning rates of one optimizer over its updates, under the schedule of the configuration."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR

from hpctrain.config.schedule import Plateau
from hpctrain.errors import ConfigError
from hpctrain.phrases import counted
from hpctrain.run.evaluation import EVAL_PREFIX
from hpctrain.train.schedule import Factor, warm_up

log = logging.getLogger("hpctrain.train")


class LearningRate:
    """The learning rates of one optimizer; this one sets them as a function of the update, and has no state.

    Subclasses that follow the updates override `after_update`; `Update` calls only what is overridden.

    Args:
        optimizer: its groups' `initial_lr`, or else `lr`, are the rates at the factor 1.
        factor: of the rates, by update, counted from 0.
        base_lr: the rate at the factor 1 that is logged; None for that of the first group.

    Attributes:
        current: the rate of the last update, for the log.
        needs_evaluation: whether the rates follow evaluations.
        overwrites: whether the rates are the schedule's own, and not multiples of the optimizer's.
    """

    needs_evaluation = False
    overwrites = False

    def __init__(self, optimizer: torch.optim.Optimizer, factor: Factor, base_lr: float | None = None) -> None:
        # its groups are other objects after it was restored
        self._optimizer = optimizer
        self._factor = factor
        self._base_rates = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
        self._base_lr = self._base_rates[0] if base_lr is None else base_lr
        self.current = self._base_lr

    def begin(self, update: int) -> None:
        """Set the rates for an update, counted from 0; skipped updates don't count."""
        factor = self._factor(update)
        self.current = self._base_lr * factor
        for group, base in zip(self._optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = base * factor

    def after_update(self) -> None:
        """Follow an update that wasn't skipped."""

    def after_evaluation(self, step: int, means: Mapping[str, float]) -> None:
        """Follow an evaluation, on every rank alike.

        Args:
            step: completed steps.
            means: by logged name, such as `eval/loss`; the same on every rank.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint; empty for a function of the update."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a result of `state_dict`, once the optimizer is restored; that of another class is ignored."""


class PlateauLearningRate(LearningRate):
    """Lowers the rates when a metric has stopped improving: torch's ReduceLROnPlateau, with a warm-up.

    Args:
        optimizer: whose rates are set.
        schedule: of the configuration.
        metric: name as the evaluation returns it.
        mode: `min` or `max`.
        steps_per_epoch: converts a warm-up in epochs.
        base_lr: as in the base class.
    """

    needs_evaluation = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        schedule: Plateau,
        *,
        metric: str,
        mode: str,
        steps_per_epoch: int,
        base_lr: float | None = None,
    ) -> None:
        warmup, rise = warm_up(schedule, steps_per_epoch)
        super().__init__(optimizer, lambda update: rise(update) * self._reduced, base_lr)
        self._schedule = schedule
        self._metric = metric
        self._sign = 1.0 if mode == "min" else -1.0
        self._warmup = warmup
        self._updates = 0
        self._reduced = 1.0
        self._best = math.inf
        self._num_bad = 0
        self._cooldown = 0

    def begin(self, update: int) -> None:
        """As the base class; also note the update for the warm-up's end."""
        self._updates = update + 1
        super().begin(update)

    def after_evaluation(self, step: int, means: Mapping[str, float]) -> None:
        """Compare the metric with the best one, and lower the rates if it hasn't improved for too long.

        Raises:
            ConfigError: the evaluation doesn't return the metric.
        """
        policy, value = self._schedule, metric_in(means, self._metric, "schedule.kind", "plateau") * self._sign
        # as torch's threshold_mode="rel": a negative best value needs the share added
        best = self._best - abs(self._best) * policy.threshold if math.isfinite(self._best) else self._best
        if value < best:
            self._best = value
            self._num_bad = 0
        else:
            self._num_bad += 1
        if self._cooldown > 0 or self._updates <= self._warmup:
            self._cooldown = max(0, self._cooldown - 1)
            self._num_bad = 0
        if self._num_bad > policy.patience:
            before, self._reduced = self._reduced, max(self._reduced * policy.factor, policy.min_factor)
            self._cooldown = policy.cooldown
            self._num_bad = 0
            if self._reduced < before:
                log.info(
                    "step %d: %s hasn't improved in %s: the learning rate's factor is %g now",
                    step,
                    self._metric,
                    counted(policy.patience + 1, "evaluation"),
                    self._reduced,
                )

    def state_dict(self) -> dict[str, Any]:
        """Return factor, best value and counts."""
        return {
            "kind": "plateau",
            "metric": (self._metric, self._sign),
            "reduced": self._reduced,
            "best": self._best,
            "num_bad": self._num_bad,
            "cooldown": self._cooldown,
            "updates": self._updates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a result of `state_dict`; the best value of another metric is dropped."""
        if state.get("kind") != "plateau":
            return
        self._reduced = state["reduced"]
        self._cooldown = state["cooldown"]
        self._updates = state["updates"]
        if tuple(state["metric"]) == (self._metric, self._sign):
            self._best = state["best"]
            self._num_bad = state["num_bad"]


@dataclass(frozen=True, slots=True)
class GroupsBefore:
    """The groups of an optimizer before a scheduler of torch was made, which may overwrite their rates.

    Attributes:
        rates: at the factor 1.
        keys: of each group.
    """

    rates: Sequence[float]
    keys: Sequence[Collection[str]]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> GroupsBefore:
        """Note them."""
        groups = optimizer.param_groups
        return cls([float(group.get("initial_lr", group["lr"])) for group in groups], [set(group) for group in groups])


class TorchLearningRate(LearningRate):
    """Rates, and perhaps momenta, that a scheduler of torch sets after each update.

    Args:
        optimizer: whose rates are set.
        scheduler: over this optimizer, before its first step.
        before: the optimizer's groups without the scheduler.
        base_lr: as in the base class.

    Attributes:
        ignores_groups: whether it has rates of its own that aren't in the proportions of the groups' rates.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: LRScheduler,
        before: GroupsBefore,
        base_lr: float | None = None,
    ) -> None:
        super().__init__(optimizer, lambda _: 1.0, before.rates[0] if base_lr is None else base_lr)
        self._scheduler = scheduler
        self._fresh = copy.deepcopy(scheduler.state_dict())
        own = [[float(group["initial_lr"]) for group in optimizer.param_groups]]
        own += [[float(rate) for rate in getattr(scheduler, name, ())] for name in ("base_lrs", "max_lrs")]
        self.overwrites = any(rates and rates != list(before.rates) for rates in own)
        self.ignores_groups = any(rates and not _proportional(rates, before.rates) for rates in own)
        self._base_rates = list(before.rates)
        self._options = [
            {name: copy.deepcopy(value) for name, value in group.items() if name not in keys}
            for group, keys in zip(optimizer.param_groups, before.keys, strict=True)
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


def metric_in(means: Mapping[str, float], metric: str, key: str, value: object) -> float:
    """Return a metric of an evaluation.

    Args:
        means: by logged name.
        metric: without its prefix.
        key: the configured key that needs it.
        value: of that key.

    Raises:
        ConfigError: the evaluation doesn't return it.
    """
    found = means.get(f"{EVAL_PREFIX}{metric}")
    if found is None:
        given = ", ".join(sorted(name.removeprefix(EVAL_PREFIX) for name in means)) or "nothing"
        problem = f"needs the metric {metric}, but the evaluation returns {given}"
        raise ConfigError(key, value, problem, "set checkpoint.metric to one of these")
    return found


def _proportional(rates: Sequence[float], expected: Sequence[float]) -> bool:
    pairs = zip(rates, expected, strict=False)
    return len(rates) == len(expected) and all(
        math.isclose(rate * expected[0], rates[0] * other, rel_tol=1e-6) for rate, other in pairs
    )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(_same(one[k], other[k]) for k in one)
    return bool(one == other)
