"""Check the class of a task itself, where its source didn't show enough before the run was launched."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType

from hpctrain.config.task_methods import METHODS, cant_be_called, lacks, never_called
from hpctrain.tasks.task import Task


def check_class(kind: type[Task], target: str) -> None:
    """Check the methods of a task.

    Args:
        kind: its class.
        target: as the configuration names it.

    Raises:
        ConfigError: it lacks a method, or has one that can't be called or would never be.
    """
    for method in sorted(kind.__abstractmethods__):
        raise lacks(target, method)
    own = [one for one in kind.__mro__ if issubclass(one, Task) and one is not Task]
    methods = {name: value for one in own for name, value in vars(one).items() if isinstance(value, FunctionType)}
    mentioned = METHODS.keys() | {name for value in methods.values() for name in _mentioned(value.__code__)}
    for name in methods:
        if (mistake := never_called(target, name, mentioned)) is not None:
            raise mistake
    for name, arguments in METHODS.items():
        if name in methods and isinstance(method := inspect.getattr_static(kind, name), FunctionType):
            try:
                inspect.signature(method).bind("self", *arguments)
            except TypeError as error:
                raise cant_be_called(target, name, arguments, str(error)) from None


def _mentioned(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inside in code.co_consts:
        if isinstance(inside, CodeType):
            yield from _mentioned(inside)
