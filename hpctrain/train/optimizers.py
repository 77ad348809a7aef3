"""Build optimizers from their configuration; errors of a user's own class pass through."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.checkpoint.host_memory import require_storable
from hpctrain.config.optimizer import (
    NAMED_KEYS,
    OPTION_KEYS,
    NamedOptimizer,
    ParameterOptions,
    entries_of,
    named_optimizers,
    parameter_options,
)
from hpctrain.config.target import NEEDS_A_CLOSURE
from hpctrain.errors import ConfigError, TaskError
from hpctrain.phrases import listed
from hpctrain.train.build import instantiate, locate
from hpctrain.train.learning_rate import LearningRate
from hpctrain.train.parameter_groups import ModelNames, ParameterGroup, assign, distribute, split


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltOptimizer:
    """An optimizer, and what the training knows of its groups.

    Attributes:
        settings: its configuration.
        optimizer: over the parameters of the groups that aren't frozen.
        base_lr: its learning rate at the schedule's factor 1, without the factors of groups.
        groups: of its parameters, frozen ones included.
    """

    settings: NamedOptimizer
    optimizer: torch.optim.Optimizer
    base_lr: float
    groups: Sequence[ParameterGroup]


def build_optimizers(node: Mapping[str, Any], model: nn.Module, global_batch_size: int) -> list[BuiltOptimizer]:
    """Build the optimizers over the parameters that require a gradient; each group's `initial_lr` is the scaled rate.

    Args:
        node: the group `optimizer`.
        model: whose parameters are trained.
        global_batch_size: scales the learning rate if `lr_scaling` asks for it.

    Raises:
        TaskError: no parameter requires a gradient, or a class isn't an optimizer.
        ConfigError: a step needs a closure, an entry of the groups matches nothing or has an unknown option, or a
            parameter belongs to no optimizer, or to two.
    """
    names = ModelNames(model)
    if not any(parameter.requires_grad for parameter in names.parameters.values()):
        raise TaskError("no parameter of the model requires a gradient: there is nothing to train")
    optimizers = named_optimizers(node)
    pairs = zip(optimizers, distribute(optimizers, names), strict=True)
    return [_build_optimizer(settings, names, own_names, global_batch_size) for settings, own_names in pairs]


def _build_optimizer(
    settings: NamedOptimizer, names: ModelNames, own_names: Sequence[str], global_batch_size: int
) -> BuiltOptimizer:
    key, node = settings.key, settings.node
    handling, entries = parameter_options(node), entries_of(key, node)
    groups = split(assign(names, own_names, entries), handling, names, key)
    trained = [group for group in groups if not group.frozen]
    # as a plain list if there is nothing to tell apart: not every class of a user's own takes groups
    plain = not entries and len(trained) == 1 and not trained[0].options
    arguments = (
        list(trained[0].parameters.values())
        if plain
        else [{"params": list(group.parameters.values()), **group.options} for group in trained]
    )
    handled = NAMED_KEYS if settings.name else OPTION_KEYS
    options = {name: value for name, value in node.items() if name not in handled}
    if settings.shared:
        takes = inspect.signature(locate(key, node["_target_"])).parameters
        options = {name: value for name, value in settings.shared.items() if name in takes} | options
    optimizer = instantiate(key, options, arguments)
    _check_class(key, node["_target_"], optimizer)
    # some classes make states in their constructor
    drop_absent_states(optimizer)
    _check_options(groups, optimizer)
    factor = _learning_rate_scale(handling, global_batch_size)
    own_factors = {id(parameter): group.lr_factor for group in trained for parameter in group.parameters.values()}
    for group in optimizer.param_groups:
        own_factor = factor * own_factors.get(id(group["params"][0]), 1.0)
        group["lr"] = group["lr"] * own_factor
        # the schedule overwrites `lr` in each step, in place if it is a tensor, and needs the rate that it starts from
        group["initial_lr"] = float(group["lr"])
    base_lr = optimizer.defaults.get("lr", optimizer.param_groups[0]["lr"])
    return BuiltOptimizer(settings=settings, optimizer=optimizer, base_lr=float(base_lr) * factor, groups=groups)


def drop_absent_states(optimizer: torch.optim.Optimizer) -> None:
    """Drop the states of parameters that only other ranks of a pipeline have."""
    for parameter in [key for key in optimizer.state if isinstance(key, Tensor) and key.is_meta]:
        del optimizer.state[parameter]


def _check_class(key: str, target: str, optimizer: object) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TaskError(f"{key}._target_={target} made a {type(optimizer).__name__}, not an optimizer")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(f"{key}._target_", target, NEEDS_A_CLOSURE, "choose another class of torch.optim")


def _check_options(groups: Sequence[ParameterGroup], optimizer: torch.optim.Optimizer) -> None:
    """Refuse options of groups that the class doesn't have: torch stores them, and nothing reads them."""
    for group in groups:
        for name in group.entry.options if group.entry is not None else ():
            if name not in optimizer.defaults:
                choices = ", ".join(optimizer.defaults)
                problem = f"is not an option of a group of {type(optimizer).__name__}"
                assert group.entry is not None
                raise ConfigError(f"{group.entry.key}.{name}", group.entry.options[name], problem, f"it has {choices}")


def _learning_rate_scale(handling: ParameterOptions, global_batch_size: int) -> float:
    ratio = global_batch_size / handling.lr_base_batch_size
    return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[handling.lr_scaling]


log = logging.getLogger("hpctrain.train")


class StateCheck:
    """Checks the state of one optimizer after its first and its second update in an attempt.

    Args:
        optimizer: whose state is checked.
        learning_rate: its schedule.
        name: of the optimizer among several; empty for the only one.
        warns: whether to log warnings, which one rank does for all.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, learning_rate: LearningRate, *, name: str = "", warns: bool
    ) -> None:
        self._optimizer = optimizer
        self._learning_rate = learning_rate
        self._key = f"optimizer.named.{name}" if name else "optimizer"
        self._warns = warns
        self._first: dict[str, object] | None = None

    def __call__(self) -> bool:
        """Check the state after an update that wasn't skipped.

        Returns:
            Whether the check is done.

        Raises:
            TaskError: a checkpoint can't hold the state; the message names the value's place.
        """
        attributes = _outside_of_checkpoints(self._optimizer)
        if self._first is None:
            self._require_storable()
            self._first = attributes
            return False
        # only now: what the first update adds may be constant from then on
        lost = [name for name, value in attributes.items() if value is None or value != self._first.get(name)]
        if lost and self._warns:
            log.warning(
                "%s: updates change %s of %s, which checkpoints don't have: a resume won't be exact; keep such values "
                "in the optimizer's state or param_groups, or override its state_dict and load_state_dict",
                self._key,
                listed(lost),
                type(self._optimizer).__name__,
            )
        return True

    def _require_storable(self) -> None:
        kind = type(self._optimizer).__name__
        states = {
            f"{self._key}: {kind}.state_dict()": self._optimizer.state_dict(),
            f"{self._key}: the state of its schedule": self._learning_rate.state_dict(),
        }
        for name, state in states.items():
            require_storable(state, name)


def _outside_of_checkpoints(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return fingerprints of the attributes that no state dict has, by name; None for another optimizer's state."""
    kind = type(optimizer)
    if kind.__module__.startswith("torch.optim.") or kind.state_dict is not torch.optim.Optimizer.state_dict:
        return {}
    fingerprints: dict[str, Any] = {}
    for name, value in vars(optimizer).items():
        if type(value) in (int, float):
            fingerprints[name] = value
        elif isinstance(value, Tensor):
            fingerprints[name] = id(value), value._version
        elif isinstance(value, torch.optim.Optimizer) and value.state:
            fingerprints[name] = None
    return fingerprints
