"""The learning rates of one optimizer that a scheduler of torch sets."""

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

from hpctrain.train.learning_rate import LearningRate

log = logging.getLogger("hpctrain.train")


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
