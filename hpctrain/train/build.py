"""From the configuration's `_target_` groups to objects; what a user's own code raises passes through as it is."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hpctrain.config.checks import NEEDS_A_CLOSURE
from hpctrain.config.optimizer import HANDLING_KEYS, Handling, handling_of
from hpctrain.errors import ConfigError, TaskError
from hpctrain.tasks.task import Task


def locate(key: str, target: str) -> Any:
    """The object that an import path names.

    Raises:
        ConfigError: its module has no such name; an error inside of the module passes through.
    """
    parts = target.split(".")
    for split in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:split])
        try:
            found: Any = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
                continue
            raise
        for attribute in parts[split:]:
            if not hasattr(found, attribute):
                raise ConfigError(f"{key}._target_", target, f"{name} has no {attribute}", "see the spelling")
            found = getattr(found, attribute)
        return found
    raise ConfigError(f"{key}._target_", target, f"there is no module {parts[0]}", "see the spelling, or install it")


def instantiate(key: str, node: Mapping[str, Any], *arguments: Any) -> Any:
    """Call what ``_target_`` names with the other keys; nodes inside that have a ``_target_`` are built first."""
    options = {
        name: instantiate(f"{key}.{name}", value) if isinstance(value, Mapping) and "_target_" in value else value
        for name, value in node.items()
        if name != "_target_"
    }
    return locate(key, node["_target_"])(*arguments, **options)


def build_task(node: Mapping[str, Any]) -> Task:
    """The task.

    Raises:
        TaskError: the class is no `Task`.
    """
    task = instantiate("task", node)
    if not isinstance(task, Task):
        raise TaskError(
            f"task._target_={node['_target_']} made a {type(task).__name__}: derive it from hpctrain.tasks.Task"
        )
    return task


def build_model(node: Mapping[str, Any], task: Task) -> nn.Module:
    """The configured model, or the task's own.

    Raises:
        TaskError: what was built is no module.
    """
    model = task.build_model() if node["_target_"] is None else instantiate("model", node)
    if not isinstance(model, nn.Module):
        raise TaskError(f"the model must be a torch.nn.Module, but is a {type(model).__name__}")
    return model


def build_optimizer(node: Mapping[str, Any], model: nn.Module, global_batch_size: int) -> torch.optim.Optimizer:
    """The optimizer over the parameters that require a gradient; each group's `initial_lr` is the scaled one.

    Args:
        node: of the configuration; what is hpctrain's own in it (`Handling`) isn't handed to the class.
        model: whose parameters.
        global_batch_size: by which the learning rate is scaled, if it is.

    Raises:
        TaskError: there is nothing to optimise, or the class is no optimizer.
        ConfigError: it is one that needs a closure.
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
    times = learning_rate_scale(handling, global_batch_size)
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] = group["lr"] if times == 1 else group["lr"] * times
    return optimizer


def learning_rate_scale(handling: Handling, global_batch_size: int) -> float:
    """What the configured learning rate is multiplied by for the size of the global batch."""
    ratio = global_batch_size / handling.lr_base_batch_size
    return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[handling.lr_scaling]


def _groups(named: Sequence[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    """With weight decay and without: what has fewer than two dimensions, or is called a bias."""
    spared = [parameter for name, parameter in named if parameter.ndim < 2 or name.rpartition(".")[2] == "bias"]
    ids = {id(parameter) for parameter in spared}
    groups: list[dict[str, Any]] = [
        {"params": [parameter for _, parameter in named if id(parameter) not in ids]},
        {"params": spared, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
