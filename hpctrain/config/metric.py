"""The metric by which a run is judged, as far as its configuration and the source of its task's class show it."""

from __future__ import annotations

import ast

from hpctrain.config.module_source import AbsentError, UnknownError, find_definition, find_module
from hpctrain.config.root import Config
from hpctrain.config.signature import lineage


def metric_name(config: Config) -> str | None:
    """Return the metric's name, as the task's `evaluate` names it; None if only the task's class itself can tell."""
    if config.checkpoint.metric is not None:
        return config.checkpoint.metric
    name = _constants_of(_target(config)).get("metric")
    return name if isinstance(name, str) else None


def metric_mode(config: Config) -> str | None:
    """Return `min` or `max`: which values of the metric are better; None if only the task's class itself can tell."""
    checkpoint = config.checkpoint
    if checkpoint.metric_mode is not None:
        return checkpoint.metric_mode
    own = _constants_of(_target(config))
    if checkpoint.metric in (None, own.get("metric")):
        mode = own.get("metric_mode")
        return mode if mode in ("min", "max") else None
    return "min" if checkpoint.metric == "loss" else None


def may_have_mode(config: Config) -> bool:
    """Whether something may define which values of the metric are better; False only if nothing can."""
    own = _constants_of(_target(config)).get("metric")
    return metric_mode(config) is not None or own is None or config.checkpoint.metric in (None, own)


def _target(config: Config) -> str:
    """Return the dotted name of the task's class; empty for a stored configuration without a task."""
    return str((config.task or {}).get("_target_", ""))


def _constants_of(target: str) -> dict[str, object]:
    """Return the constants that a class or its base classes set in their bodies.

    Names that are set or defined in any other way are left out. Empty if the source can't be read.

    Args:
        target: the class's dotted name.
    """
    module, _, name = target.rpartition(".")
    if not module:
        return {}
    try:
        found = find_module(module)
        if found is None or found[1]:
            return {}
        source, node = find_definition(found[0], name)
        chain = lineage(source, node)[0] if isinstance(node, ast.ClassDef) else []
    except (AbsentError, UnknownError, SyntaxError):
        return {}
    constants: dict[str, object] = {}
    for _, base in reversed(chain):
        constants |= {
            target.id: statement.value
            for statement in base.body
            if isinstance(statement, ast.Assign | ast.AnnAssign)
            for target in (statement.targets if isinstance(statement, ast.Assign) else [statement.target])
            if isinstance(target, ast.Name)
        }
        stored = (
            each for each in ast.walk(base) if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
        )
        defined = (each for each in base.body if isinstance(each, ast.FunctionDef))
        for each in (*(one.attr for one in stored), *(one.name for one in defined)):
            constants.pop(each, None)
    return {name: value.value for name, value in constants.items() if isinstance(value, ast.Constant)}
