"""Check what a task's methods for its evaluation return."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpctrain.errors import TaskError
from hpctrain.tasks.metric import Metric, PerSample
from hpctrain.tasks.task import Task

EXAMPLE = '{"loss": (loss * len(batch), len(batch))}'


class Results(NamedTuple):
    """What `Task.evaluate` returned for a batch.

    Attributes:
        sums: by metric, the sum as a 0-d tensor, and the count as a 0-d tensor or a number.
        per_sample: by name, a tensor of shape [n, ...], or n tensors.
    """

    sums: dict[str, tuple[Tensor, Tensor | float]]
    per_sample: dict[str, Tensor | list[Tensor]]


def checked_results(task: Task, returned: Any, num_samples: int) -> Results:
    """Check the result of `Task.evaluate`.

    Args:
        task: that returned it.
        returned: by the method.
        num_samples: of the batch.

    Raises:
        TaskError: it isn't a dict of pairs of single numbers, and of values for each sample.
    """
    method = f"{type(task).__name__}.evaluate"
    if not isinstance(returned, Mapping):
        raise TaskError(_expected(method, f"it returned {_shown(returned)}"))
    sums, per_sample = {}, {}
    for name, found in returned.items():
        if not isinstance(name, str):
            raise TaskError(_expected(method, f"it has the key {name!r}"))
        if isinstance(found, PerSample):
            per_sample[name] = _checked_samples(f"{method}: PerSample {name!r}", found.values, num_samples)
            continue
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise TaskError(_expected(method, f"its {name!r} is {_shown(found)}"))
        for value, role in zip(found, ("sum", "count"), strict=True):
            if not _is_number(value):
                raise TaskError(_expected(method, f"the {role} of its {name!r} is {_shown(value)}"))
        total, count = found
        # torch would turn a plain number into a float32
        exact = total if isinstance(total, Tensor) else torch.tensor(float(total), dtype=torch.float64)
        sums[name] = exact.reshape(()), _single(count)
    return Results(sums, per_sample)


def checked_metrics(task: Task) -> dict[str, Any]:
    """Call `Task.build_metrics`, and check the result.

    Raises:
        TaskError: it isn't a dict of metric objects, or one object has two names.
    """
    method = f"{type(task).__name__}.build_metrics"
    if not callable(task.build_metrics):
        raise TaskError(
            f"{method} must be a method that returns metrics by name: rename this {_kind(task.build_metrics)}"
        )
    problem = f"{method} must return a dict of torchmetrics' metrics, or of subclasses of hpctrain.tasks.Metric"
    found = task.build_metrics()
    if not isinstance(found, Mapping):
        raise TaskError(f"{problem}, but it returned {_shown(found)}")
    for name, metric in found.items():
        if not isinstance(name, str):
            raise TaskError(f"{problem}, but it has the key {name!r}")
        if not isinstance(metric, Metric) and not is_of_torchmetrics(metric):
            hint = ": call it" if isinstance(metric, type) else ""
            raise TaskError(f"{problem}, but its {name!r} is {_shown(metric)}{hint}")
    if len({id(metric) for metric in found.values()}) < len(found):
        raise TaskError(f"{problem}, each with one name, but one object has several")
    return dict(found)


def is_of_torchmetrics(value: object) -> bool:
    """Whether a value is a metric of torchmetrics, or a collection of these; doesn't import the package."""
    package = sys.modules.get("torchmetrics")
    return package is not None and isinstance(value, package.Metric | package.MetricCollection)


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


def checked_scores(task: Task, returned: Any) -> dict[str, float]:
    """Check the result of `Task.compute_metrics`, and return its values as floats.

    A value of a vector or dict is NAME/KEY.

    Raises:
        TaskError: it isn't a dict of numbers, vectors and dicts of them.
    """
    method = f"{type(task).__name__}.compute_metrics"
    if not isinstance(returned, Mapping):
        raise TaskError(f"{method} must return a dict of numbers by metric, but it returned {_shown(returned)}")
    return {name: value for key, found in returned.items() for name, value in _flattened(method, key, found)}


def checked_computed(task: Task, name: str, computed: Any) -> dict[str, float]:
    """Check what a metric object computed, and return its values as floats by NAME or NAME/KEY.

    Raises:
        TaskError: it isn't a number, a vector, or a dict of them.
    """
    return dict(_flattened(f"the metric {name!r} of {type(task).__name__}", name, computed))


def _flattened(source: str, name: object, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if _is_number(value):
        yield str(name), float(value)
    elif isinstance(value, Mapping):
        for key, inside in value.items():
            yield from _flattened(source, f"{name}/{key}", inside)
    elif isinstance(value, list | tuple) and all(_is_number(each) for each in value):
        yield from ((f"{name}/{index}", float(each)) for index, each in enumerate(value))
    elif isinstance(value, Tensor) and value.ndim == 1 and not value.is_complex():
        yield from ((f"{name}/{index}", each) for index, each in enumerate(value.double().tolist()))
    else:
        raise TaskError(
            f"{source} must be a number, a vector, or a dict of them, but {str(name)!r} is {_shown(value)}: "
            "a curve or a matrix can't be logged as a number"
        )


def _checked_samples(what: str, values: Any, num_samples: int) -> Tensor | list[Tensor]:
    if isinstance(values, Tensor):
        if values.ndim == 0 or len(values) != num_samples:
            raise TaskError(
                f"{what} needs one entry for each of the {num_samples} samples of the batch, but is {_shown(values)}"
            )
        return values
    if not isinstance(values, list | tuple) or not all(isinstance(value, Tensor) for value in values):
        raise TaskError(f"{what} needs a tensor, or a list of tensors, but is {_shown(values)}")
    if len(values) != num_samples:
        raise TaskError(f"{what} needs a tensor for each of the {num_samples} samples, but has {len(values)}")
    if all(value.ndim == 0 for value in values):
        return torch.stack(list(values))
    return list(values)


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


def _kind(value: object) -> str:
    return type(value).__name__


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {_kind(value)} of {len(value)}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return "None: check its return statement" if value is None else f"a {_kind(value)}"
