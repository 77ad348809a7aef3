"""The learning rates of one optimizer: the schedule's factor as a function of the step, and its use."""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Any

import torch

from hpctrain.config.checkpoint import EVAL_PREFIX
from hpctrain.config.schedule import Plateau, Schedule, WarmUp
from hpctrain.errors import ConfigError
from hpctrain.phrases import counted

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
        metric: name of the metric of evaluations that the rates follow, without its prefix; None if they follow none.
        key: full name of the key that has them follow it.
        overwrites: whether the rates are the schedule's own, and not multiples of the optimizer's.
    """

    metric: str | None = None
    key = "schedule.kind"
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

    def restore_current(self, rate: float) -> None:
        """Log this rate until the next update."""
        self.current = rate


class PlateauLearningRate(LearningRate):
    """Lowers the rates when a metric has stopped improving: torch's ReduceLROnPlateau, with a warm-up.

    Args:
        optimizer: whose rates are set.
        schedule: of the configuration.
        metric: name as the evaluation returns it.
        mode: `min` or `max`.
        steps_per_epoch: converts a warm-up in epochs.
        base_lr: as in the base class.
        key: full name of the key that chose it, for errors.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        schedule: Plateau,
        *,
        metric: str,
        mode: str,
        steps_per_epoch: int,
        base_lr: float | None = None,
        key: str = "schedule.kind",
    ) -> None:
        warmup, rise = warm_up(schedule, steps_per_epoch)
        super().__init__(optimizer, lambda update: rise(update) * self._reduced, base_lr)
        self._schedule = schedule
        self.metric = metric
        self.key = key
        self._sign = 1.0 if mode == "min" else -1.0
        self._warmup = warmup
        self._updates = 0
        self._reduced = 1.0
        self._best = math.inf
        self._num_bad = 0
        self._cooldown = 0

    def begin(self, update: int) -> None:
        """Set the rates as the base class does, and note the update for the warm-up's end."""
        self._updates = update + 1
        super().begin(update)

    def after_evaluation(self, step: int, means: Mapping[str, float]) -> None:
        """Compare the metric with the best one, and lower the rates if it hasn't improved for too long.

        Raises:
            ConfigError: the evaluation doesn't return the metric.
        """
        policy, metric = self._schedule, f"{EVAL_PREFIX}{self.metric}"
        if metric not in means:
            returned = ", ".join(sorted(name.removeprefix(EVAL_PREFIX) for name in means)) or "nothing"
            problem = f"needs the metric {self.metric}, but the evaluation returns {returned}"
            raise ConfigError(self.key, "plateau", problem, "set checkpoint.metric to one of these")
        value = means[metric] * self._sign
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
                    self.metric,
                    counted(policy.patience + 1, "evaluation"),
                    self._reduced,
                )

    def state_dict(self) -> dict[str, Any]:
        """Return factor, best value and counts."""
        return {
            "kind": "plateau",
            "metric": (self.metric, self._sign),
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
        if tuple(state["metric"]) == (self.metric, self._sign):
            self._best = state["best"]
            self._num_bad = state["num_bad"]


ONE_CYCLE_RISE = 0.3
"""Share of the run that rises if no warm-up is configured: `pct_start` of torch's OneCycleLR."""
DECAY_SHARE = 0.1
"""Share of the run that decays if no length is configured."""

Factor = Callable[[int], float]


def learning_rate_factor(schedule: Schedule, total_steps: int, steps_per_epoch: int) -> Factor:
    """Return the factor of the optimizer's learning rates as a function of the step, counted from 0.

    - a linear rise over the warm-up, which reaches 1 at step W, its length; then
    - `constant`: 1;
    - `linear`, `cosine`: down to ``final_factor`` at the last step, linearly or along a half cosine (Loshchilov &
      Hutter, SGDR, 2017, without restarts);
    - `step`: multiplied by ``drop_factor`` at every step of ``drop_at_steps``;
    - `wsd`: 1, and over the last ``decay_steps`` linearly to ``final_factor`` (Hu et al., MiniCPM, 2024);
    - `one_cycle`: from ``start_factor`` along a half cosine to 1 at step W, then along another to ``final_factor``
      (Smith & Topin, 2018; torch's OneCycleLR without its cycle of momentum).

    Args:
        schedule: of the configuration.
        total_steps: of the run.
        steps_per_epoch: converts lengths in epochs, which are rounded to whole steps.
    """
    warmup, rise = warm_up(schedule, steps_per_epoch)
    if schedule.kind == "one_cycle":
        return _one_cycle(schedule, warmup, total_steps)
    after = _after_warmup(schedule, warmup, total_steps, steps_per_epoch)

    def factor(step: int) -> float:
        return rise(step) if step < warmup else after(step)

    return factor if warmup else after


def warm_up(schedule: WarmUp, steps_per_epoch: int) -> tuple[int, Factor]:
    """Return the steps of a linear warm-up, and its factor, which is 1 from its end on."""
    warmup = _steps(schedule.warmup_steps, schedule.warmup_epochs, steps_per_epoch)
    return warmup, lambda step: (step + 1) / (warmup + 1) if step < warmup else 1.0


def _after_warmup(schedule: Schedule, warmup: int, total_steps: int, steps_per_epoch: int) -> Factor:
    final = schedule.final_factor
    if schedule.kind in ("linear", "cosine"):
        return _decay(warmup, total_steps, final, on_cosine=schedule.kind == "cosine")
    if schedule.kind == "wsd":
        default = max(1, round(total_steps * DECAY_SHARE))
        length = _steps(schedule.decay_steps or 0, schedule.decay_epochs, steps_per_epoch) or default
        begin = max(warmup, total_steps - 1 - length)
        decay = _decay(begin, total_steps, final)
        return lambda step: 1.0 if step <= begin else decay(step)
    if schedule.kind == "step":
        epochs = [round(epochs * steps_per_epoch) for epochs in schedule.drop_at_epochs]
        drops = sorted(schedule.drop_at_steps or epochs)
        return lambda step: float(schedule.drop_factor ** bisect_right(drops, step))
    return lambda _: 1.0


def _one_cycle(schedule: Schedule, warmup: int, total_steps: int) -> Factor:
    start = schedule.start_factor
    peak = warmup or max(1, round(total_steps * ONE_CYCLE_RISE) - 1)
    decay = _decay(peak, total_steps, schedule.final_factor, on_cosine=True)

    def factor(step: int) -> float:
        if step >= peak:
            return decay(step)
        return 1.0 + (start - 1.0) * (0.5 * (1.0 + math.cos(math.pi * (step / peak))))

    return factor


def _decay(begin: int, total_steps: int, final: float, *, on_cosine: bool = False) -> Factor:
    """Return a factor that falls from 1 at a step to its final value at the last one, along a half cosine or a line."""
    length = max(1, total_steps - 1 - begin)

    def factor(step: int) -> float:
        progress = min(1.0, (step - begin) / length)
        share = 0.5 * (1.0 + math.cos(math.pi * progress)) if on_cosine else 1.0 - progress
        return final + (1.0 - final) * share

    return factor


def _steps(steps: int, epochs: float | None, steps_per_epoch: int) -> int:
    return round(epochs * steps_per_epoch) if epochs else steps
