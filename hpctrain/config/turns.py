"""Check what several losses and unfreezing need of the other groups, before anything is written or submitted."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Mapping
from typing import Any

from hpctrain.config.module_source import UnknownError, bindings, find_definition, find_module
from hpctrain.config.named_optimizers import NamedOptimizer, losses_of, named_optimizers
from hpctrain.config.parameter_groups import entries_of
from hpctrain.config.root import Config
from hpctrain.config.signature import lineage
from hpctrain.errors import ConfigError
from hpctrain.phrases import listed

TASK = ("hpctrain.tasks.task", "Task")
WHOLE_CALLS = "works on calls of the whole model, but with several losses a task calls parts of it"
"""Why some keys are refused with several turns."""


def check_turns(config: Config) -> None:
    """Check the losses of named optimizers, and groups that are unfrozen.

    Raises:
        ConfigError: the task has no such method, or another key doesn't work with several losses, or with unfreezing.
    """
    optimizers = named_optimizers(config.optimizer)
    for each in optimizers:
        _require_method(each, config.task)
    if len(losses_of(optimizers)) > 1:
        _check_several_losses(config)
    if config.trainer.compile:
        for each in optimizers:
            for entry in entries_of(each.key, each.node):
                for name in ("unfreeze_at_step", "unfreeze_at_epoch"):
                    if getattr(entry, name) is not None:
                        problem = "doesn't work with trainer.compile=true: the model would have to be compiled again"
                        raise ConfigError(f"{entry.key}.{name}", getattr(entry, name), problem, "set one of them")


def _check_several_losses(config: Config) -> None:
    kind = config.precision.kind
    if kind in ("bf16_pure", "fp16_master"):
        remedy = f"use precision={kind.partition('_')[0]}"
        raise ConfigError("precision.kind", kind, WHOLE_CALLS, remedy)
    if config.trainer.compile:
        remedy = "compile parts of the model in build_model"
        raise ConfigError("trainer.compile", True, WHOLE_CALLS, remedy)
    if config.parallel.kind == "data_parallel":
        raise ConfigError("parallel.kind", "data_parallel", WHOLE_CALLS, "use parallel=ddp")


def _require_method(optimizer: NamedOptimizer, task: Mapping[str, Any]) -> None:
    target = str(task["_target_"])
    try:
        methods = _methods(target)
    except (UnknownError, SyntaxError):
        return
    if optimizer.loss not in methods and not optimizer.name:
        raise ConfigError("task._target_", target, "has no method loss", "define loss(self, model, batch)")
    if optimizer.loss not in methods:
        public = [name for name in methods if not name.startswith("_")]
        near = difflib.get_close_matches(optimizer.loss, public, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"define it; the class has {listed(public)}"
        raise ConfigError(f"{optimizer.key}.loss", optimizer.loss, f"{target} has no such method", remedy)


def _methods(target: str) -> list[str]:
    """Return the names that a class and its bases define, without those of `Task`, whose losses only raise.

    Raises:
        UnknownError: its source alone doesn't tell.
    """
    found = find_module(target.rpartition(".")[0])
    if found is None or found[1]:
        raise UnknownError
    source, definition = find_definition(found[0], target.rpartition(".")[2])
    if not isinstance(definition, ast.ClassDef):
        raise UnknownError
    chain, _ = lineage(source, definition)
    own = [one for source, one in chain if (source.name, one.name) != TASK]
    return list(dict.fromkeys(name for one in own for name, _ in bindings(one.body)))
