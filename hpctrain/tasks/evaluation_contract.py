"""Check what a task's `evaluate` and `derive` return."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from hpctrain.errors import TaskError
from hpctrain.tasks.task import Task

EXAMPLE = '{"loss": (loss * len(batch), len(batch))}'


def checked_sums(task: Task, returned: Any) -> dict[str, tuple[Tensor, Tensor | float]]:
    """Check the result of `Task.evaluate`; return each sum as a 0-d tensor, and each count as a 0-d tensor or a number.

    Raises:
        TaskError: it isn't a dict of pairs of single numbers.
    """
    method = f"{type(task).__name__}.evaluate"
    if not isinstance(returned, Mapping):
        raise TaskError(_expected(method, f"it returned {_shown(returned)}"))
    sums = {}
    for name, pair in returned.items():
        if not isinstance(name, str):
            raise TaskError(_expected(method, f"it has the key {name!r}"))
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TaskError(_expected(method, f"its {name!r} is {_shown(pair)}"))
        for value, role in zip(pair, ("sum", "count"), strict=True):
            if not _is_number(value):
                raise TaskError(_expected(method, f"the {role} of its {name!r} is {_shown(value)}"))
        total, count = pair
        # torch would turn a plain number into a float32
        exact = total if isinstance(total, Tensor) else torch.tensor(float(total), dtype=torch.float64)
        sums[name] = exact.reshape(()), _single(count)
    return sums


def checked_values(task: Task, returned: Any) -> dict[str, float]:
    """Check the result of `Task.derive`, and return its values as floats.

    Raises:
        TaskError: it isn't a dict of single numbers.
    """
    problem = f"{type(task).__name__}.derive must return a dict of numbers by metric"
    if not isinstance(returned, Mapping):
        raise TaskError(f"{problem}, but it returned {_shown(returned)}")
    for name, value in returned.items():
        if not isinstance(name, str):
            raise TaskError(f"{problem}, but it has the key {name!r}")
        if not _is_number(value):
            raise TaskError(f"{problem}, but its {name!r} is {_shown(value)}")
    return {name: float(value) for name, value in returned.items()}


def _single(count: Tensor | float) -> Tensor | float:
    return count.reshape(()) if isinstance(count, Tensor) else float(count)


def _is_number(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, Real)


def _expected(method: str, found: str) -> str:
    return (
        f"{method} must return a dict of pairs by metric, each the sum over the batch and the number of summed values, "
        f"such as {EXAMPLE}, but {found}"
    )


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return "None: check its return statement" if value is None else f"a {type(value).__name__}"
