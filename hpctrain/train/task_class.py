"""Check the class of a task itself, where its source didn't show enough before the run was launched."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from functools import cached_property
from types import CodeType, FunctionType

from hpctrain.config.task_checks import called_methods, cant_be_called, lacks, warnings_about
from hpctrain.tasks.task import Task

log = logging.getLogger("hpctrain.train")


def check_class(kind: type[Task], target: str, losses: Sequence[str]) -> None:
    """Check the methods of a task, and log a warning about those that look like mistakes.

    Args:
        kind: its class.
        target: as the configuration names it.
        losses: its methods that compute losses, as the configuration names them.

    Raises:
        ConfigError: it lacks a method, or has one that can't be called.
    """
    for method in sorted(kind.__abstractmethods__):
        raise lacks(target, method)
    known = called_methods(losses)
    own = [one for one in kind.__mro__ if issubclass(one, Task) and one is not Task]
    methods = {name: value for one in own for name, value in vars(one).items() if isinstance(value, FunctionType)}
    for name, arguments in known.items():
        if name in methods and isinstance(method := inspect.getattr_static(kind, name), FunctionType):
            try:
                # the decorator's own signature: it may pass the method more arguments than it gets
                inspect.signature(method, follow_wrapped=False).bind("self", *arguments)
            except TypeError as error:
                raise cant_be_called("task", target, name, arguments, str(error)) from None
    for line in warnings_about(target, methods, known.keys() | set(_mentioned_in_class(kind))):
        log.warning("%s", line)


def _mentioned_in_class(kind: type[Task]) -> Iterator[str]:
    for one in kind.__mro__:
        for value in () if one is Task else vars(one).values():
            for function in _functions(value):
                yield from _mentioned(function.__code__)


def _functions(value: object) -> Iterator[FunctionType]:
    """Yield the plain functions in what a class defines, below their decorators."""
    if isinstance(value, property):
        parts: Sequence[object] = (value.fget, value.fset, value.fdel)
    elif isinstance(value, cached_property):
        parts = (value.func,)
    elif isinstance(value, staticmethod | classmethod):
        parts = (value.__func__,)
    else:
        parts = (value,)
    for part in parts:
        if isinstance(part, FunctionType) and isinstance(inner := inspect.unwrap(part), FunctionType):
            yield inner


def _mentioned(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inside in code.co_consts:
        if isinstance(inside, CodeType):
            yield from _mentioned(inside)
