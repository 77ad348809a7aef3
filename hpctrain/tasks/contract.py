"""Check what a task's methods return, and the names and values that it logs."""

from __future__ import annotations

import sys
from collections.abc import ItemsView, Iterator, Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpctrain.errors import TaskError
from hpctrain.tasks.metric import Metric, PerSample

if TYPE_CHECKING:
    from hpctrain.tasks.task import Task

LOSS = "loss"
OWN_NAMES = frozenset({LOSS, "lr", "grad_norm", "epoch", "loss_scale", "skipped_updates"})
"""What hpctrain itself logs as `train/NAME`."""
LONGEST_NAME = 200
"""Characters of a name, which becomes a part of a file's name."""

EXAMPLE = '{"loss": (loss * len(batch), len(batch))}'

Scalar = Tensor | float


def split_loss(
    method: str, returned: Any, checked: set[str], own_names: frozenset[str] = OWN_NAMES
) -> tuple[Tensor, dict[str, Scalar]]:
    """Check the result of a task's loss; return the loss, and the other scalars by name.

    Args:
        method: the task's class and the method, as in `Digits.loss`, for the message.
        returned: a 0-d tensor, or a mapping with `loss`.
        checked: names that needn't be checked again; those of this result are added.
        own_names: names that hpctrain itself logs.

    Raises:
        TaskError: it is neither.
    """
    scalars: dict[str, Scalar] = {}
    if isinstance(returned, Mapping):
        if LOSS not in returned:
            names = ", ".join(map(repr, returned)) or "nothing"
            raise TaskError(
                f"{method} returned a mapping without {LOSS!r}, only {names}: return the loss to optimise as {LOSS!r}"
            )
        for name, value in returned.items():
            if name != LOSS:
                if name not in checked:
                    check_name(method, name, own_names)
                    checked.add(name)
                scalars[name] = value if is_scalar(value) else checked_scalar(method, name, value)
        returned = returned[LOSS]
    if not isinstance(returned, Tensor) or returned.ndim:
        expected = f"{method} must return a scalar tensor, the mean over the batch's samples"
        if isinstance(returned, Tensor):
            raise TaskError(f"{expected}, but its shape is {list(returned.shape)}: reduce it with .mean()")
        raise TaskError(f"{expected}, but it returned a {_type_name(returned)}: check its return statement")
    return returned, scalars


def check_name(where: str, name: Any, own_names: frozenset[str] = OWN_NAMES) -> None:
    """Check the name of a value that a task logs.

    Args:
        where: the method, for the message.
        name: of the value.
        own_names: names that hpctrain itself uses there.

    Raises:
        TaskError: it isn't a short printable string, or hpctrain logs the name itself.
    """
    if not isinstance(name, str) or not name.strip() or not name.isprintable() or len(name) > LONGEST_NAME:
        raise TaskError(
            f"{where} logs under the name {name!r}: expected a string of 1 to {LONGEST_NAME} printable characters"
        )
    if name in own_names:
        raise TaskError(f"{where} logs {name!r}, which hpctrain itself logs: choose another name")


def is_scalar(value: Any) -> bool:
    """Whether a value is a float or a real 0-d tensor, which needs no conversion."""
    return type(value) is float or (isinstance(value, Tensor) and not value.ndim and not value.is_complex())


def checked_scalar(where: str, name: str, value: Any) -> Scalar:
    """Return a value that a task logs as a 0-d tensor or a float.

    Args:
        where: the method, for the message.
        name: of the value.
        value: to check.

    Raises:
        TaskError: it isn't a scalar.
    """
    if isinstance(value, Tensor):
        if value.ndim or value.is_complex():
            kind = "complex" if value.is_complex() else f"a tensor of shape {list(value.shape)}"
            raise TaskError(f"{where}: expected a scalar as {name!r}, found {kind}; reduce it with .mean()")
        return value
    if isinstance(value, Real):
        return float(value)
    raise TaskError(f"{where}: expected a number or a scalar tensor as {name!r}, found a {_type_name(value)}")


class Results(NamedTuple):
    """Result of `Task.evaluate` for a batch.

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
    expected = (
        f"{method} must return a dict of pairs by metric, each the sum over the batch and the number of summed values, "
        f"such as {EXAMPLE}"
    )
    sums, per_sample = {}, {}
    for name, measurement in _items(expected, returned):
        if isinstance(measurement, PerSample):
            # one for each loaded sample: so they are of the same samples at every world size
            per_sample[name] = _checked_samples(f"{method}: PerSample {name!r}", measurement.values, num_samples)
            continue
        if not isinstance(measurement, tuple | list) or len(measurement) != 2:
            raise TaskError(f"{expected}, but its {name!r} is {_describe(measurement)}")
        for value, role in zip(measurement, ("sum", "count"), strict=True):
            if not _is_number(value):
                raise TaskError(f"{expected}, but the {role} of its {name!r} is {_describe(value)}")
        total, count = measurement
        # torch would turn a plain number into a float32
        exact = total if isinstance(total, Tensor) else torch.tensor(float(total), dtype=torch.float64)
        sums[name] = exact.reshape(()), count.reshape(()) if isinstance(count, Tensor) else float(count)
    return Results(sums, per_sample)


def checked_metrics(task: Task) -> dict[str, Any]:
    """Call `Task.build_metrics`, and check the result.

    Raises:
        TaskError: it isn't a dict of metric objects, or one object has two names.
    """
    method = f"{type(task).__name__}.build_metrics"
    if not callable(task.build_metrics):
        raise TaskError(
            f"{method} must be a method that returns metrics by name: rename this {_type_name(task.build_metrics)}"
        )
    problem = f"{method} must return a dict of torchmetrics' metrics, or of subclasses of hpctrain.tasks.Metric"
    metrics = task.build_metrics()
    for name, metric in _items(problem, metrics):
        if not isinstance(metric, Metric) and not is_of_torchmetrics(metric):
            hint = ": call it" if isinstance(metric, type) else ""
            raise TaskError(f"{problem}, but its {name!r} is {_describe(metric)}{hint}")
    if len({id(metric) for metric in metrics.values()}) < len(metrics):
        raise TaskError(f"{problem}, each with one name, but one object has several")
    return dict(metrics)


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
    values = {}
    for name, value in _items(problem, returned):
        if not _is_number(value):
            raise TaskError(f"{problem}, but its {name!r} is {_describe(value)}")
        values[name] = float(value)
    return values


def checked_scores(task: Task, returned: Any) -> dict[str, float]:
    """Check the result of `Task.compute_metrics`, and return its values as floats.

    A value of a vector or dict is NAME/KEY.

    Raises:
        TaskError: it isn't a dict of numbers, vectors and dicts of them.
    """
    method = f"{type(task).__name__}.compute_metrics"
    if not isinstance(returned, Mapping):
        raise TaskError(f"{method} must return a dict of numbers by metric, but it returned {_describe(returned)}")
    return {name: value for key, score in returned.items() for name, value in _flatten(method, key, score)}


def checked_computed(task: Task, name: str, computed: Any) -> dict[str, float]:
    """Check what a metric object computed, and return its values as floats by NAME or NAME/KEY.

    Raises:
        TaskError: it isn't a number, a vector, or a dict of them.
    """
    return dict(_flatten(f"the metric {name!r} of {type(task).__name__}", name, computed))


def _flatten(source: str, name: object, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if _is_number(value):
        yield str(name), float(value)
    elif isinstance(value, Mapping):
        for key, inside in value.items():
            yield from _flatten(source, f"{name}/{key}", inside)
    elif isinstance(value, list | tuple) and all(_is_number(element) for element in value):
        yield from ((f"{name}/{index}", float(element)) for index, element in enumerate(value))
    elif isinstance(value, Tensor) and value.ndim == 1 and not value.is_complex():
        yield from ((f"{name}/{index}", element) for index, element in enumerate(value.double().tolist()))
    else:
        raise TaskError(
            f"{source} must be a number, a vector, or a dict of them, but {str(name)!r} is {_describe(value)}: "
            "a curve or a matrix can't be logged as a number"
        )


def _checked_samples(what: str, values: Any, num_samples: int) -> Tensor | list[Tensor]:
    if isinstance(values, Tensor):
        if values.ndim == 0 or len(values) != num_samples:
            raise TaskError(
                f"{what} needs one entry for each of the {num_samples} samples of the batch, but is {_describe(values)}"
            )
        return values
    if not isinstance(values, list | tuple) or not all(isinstance(value, Tensor) for value in values):
        raise TaskError(f"{what} needs a tensor, or a list of tensors, but is {_describe(values)}")
    if len(values) != num_samples:
        raise TaskError(f"{what} needs a tensor for each of the {num_samples} samples, but has {len(values)}")
    if all(value.ndim == 0 for value in values):
        return torch.stack(list(values))
    return list(values)


def _items(expected: str, returned: Any) -> ItemsView[str, Any]:
    """Return the items of a mapping whose keys are names.

    Raises:
        TaskError: it isn't one; the message begins with what was expected.
    """
    if not isinstance(returned, Mapping):
        raise TaskError(f"{expected}, but it returned {_describe(returned)}")
    for name in returned:
        if not isinstance(name, str):
            raise TaskError(f"{expected}, but it has the key {name!r}")
    return returned.items()


def _is_number(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, Real)


def _type_name(value: object) -> str:
    return type(value).__name__


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {_type_name(value)} of {len(value)}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return "None: check its return statement" if value is None else f"a {_type_name(value)}"
