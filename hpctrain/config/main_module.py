"""Classes of the program that imports hpctrain: their paths begin with `__main__`, another module in each program."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from typing import Any, TypeGuard

from hpctrain.config.root import Config
from hpctrain.errors import ConfigError

MAIN = "__main__"
PASSED_TASK = f"{MAIN}.passed_task"
"""The path of a function without a name that was passed as the task."""

_bound: ContextVar[tuple[str, Callable[..., Any]] | None] = ContextVar("bound", default=None)


def is_own(target: object) -> TypeGuard[str]:
    """Whether an import path names something of the program."""
    return isinstance(target, str) and target.startswith(f"{MAIN}.")


def own_targets(config: Config) -> dict[str, str]:
    """Return the keys that name classes of the program, with their import paths."""
    return dict(_own_inside("", config))


def _own_inside(prefix: str, value: object) -> Iterator[tuple[str, str]]:
    if is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    elif isinstance(value, list):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        for name, inside in value.items():
            key = f"{prefix}.{name}" if prefix else str(name)
            if name == "_target_" and is_own(inside):
                yield key, inside
            else:
                yield from _own_inside(key, inside)


def refuse_own_targets(config: Config, problem: str) -> None:
    """Refuse classes of the program, for a training in other processes.

    Raises:
        ConfigError: the configuration names one.
    """
    for key, target in own_targets(config).items():
        name = target.rpartition(".")[2]
        remedy = f"train with hpctrain.fit, or move it into a module, such as my_task.py, and name my_task.{name}"
        raise ConfigError(key, target, problem, remedy)


def require_own_targets(config: Config) -> None:
    """Refuse classes of another program.

    Raises:
        ConfigError: this program doesn't define one that the configuration names.
    """
    for key, target in own_targets(config).items():
        if find_own(target) is None:
            problem = "only the program or notebook that started the run defines it"
            remedy = "resume it there, with hpctrain.Run(...).resume(); or move the class into a module, and name that"
            if target == PASSED_TASK:
                remedy = "there, pass the function again: fit(config, task=...), or Run(...).resume(task=...)"
            raise ConfigError(key, target, problem, remedy)


def find_own(target: str) -> Any | None:
    """Return what an import path stands for in this program; None if the program doesn't define it."""
    bound = _bound.get()
    if bound is not None and bound[0] == target:
        return bound[1]
    found: Any = sys.modules.get(MAIN) if is_own(target) else None
    for name in target.split(".")[1:]:
        found = getattr(found, name, None)
    return found


def path_of(maker: Callable[..., Any]) -> str:
    """Return the import path of a class or function; below `MAIN` if only this program has it."""
    module, name = getattr(maker, "__module__", None), getattr(maker, "__qualname__", None)
    if isinstance(module, str) and isinstance(name, str) and "<" not in name:
        return f"{module}.{name}"
    return PASSED_TASK


def require_maker(task: object) -> None:
    """Refuse a task that exists already.

    Raises:
        ConfigError: it isn't a class or function.
    """
    if not isinstance(task, type) and (not callable(task) or hasattr(task, "train_dataset")):
        name = type(task).__name__
        problem = "is an object, but each attempt makes its own, so that a resume is exact"
        raise ConfigError("task", f"a {name}", problem, f"pass the class {name}, or a function: lambda: {name}(...)")


def require_task(config: Config, task: Callable[..., Any]) -> None:
    """Refuse a task that isn't the configuration's.

    Raises:
        ConfigError: the configuration was composed for another one, or it isn't a class or function.
    """
    require_maker(task)
    target, passed_path = config.task["_target_"], path_of(task)
    if target != passed_path:
        problem = f"is not the task {passed_path} that was passed"
        raise ConfigError("task._target_", target, problem, "compose with hpctrain.compose([...], task=...)")


@contextmanager
def target_bound(target: str, maker: Callable[..., Any] | None) -> Iterator[None]:
    """Inside the context, and in its thread alone, an import path means ``maker``; None changes nothing."""
    token = _bound.set(None if maker is None else (target, maker))
    try:
        yield
    finally:
        _bound.reset(token)
