"""Check what a task's `loss` returns, and the names and values that it logs."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

from torch import Tensor

from hpctrain.errors import TaskError

LOSS = "loss"
OWN_NAMES = frozenset({LOSS, "lr", "grad_norm", "epoch", "loss_scale", "skipped_updates"})
"""What hpctrain itself logs as `train/NAME`."""
LONGEST_NAME = 200
"""Characters of a name, which becomes a part of a file's name."""

Scalar = Tensor | float


def split_loss(
    method: str, returned: Any, checked: set[str] | None = None, own_names: frozenset[str] = OWN_NAMES
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
    others: dict[str, Scalar] = {}
    if isinstance(returned, Mapping):
        if LOSS not in returned:
            found = ", ".join(map(repr, returned)) or "nothing"
            raise TaskError(
                f"{method} returned a mapping without {LOSS!r}, only {found}: return the loss to optimise as {LOSS!r}"
            )
        for name, value in returned.items():
            if name != LOSS:
                if checked is None or name not in checked:
                    check_name(method, name, own_names)
                    if checked is not None:
                        checked.add(name)
                others[name] = value if is_scalar(value) else checked_scalar(method, name, value)
        returned = returned[LOSS]
    if not isinstance(returned, Tensor) or returned.ndim:
        raise _not_a_loss(method, returned)
    return returned, others


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
    raise TaskError(f"{where}: expected a number or a scalar tensor as {name!r}, found a {type(value).__name__}")


def _not_a_loss(method: str, loss: object) -> TaskError:
    expected = f"{method} must return a scalar tensor, the mean over the batch's samples, "
    if isinstance(loss, Tensor):
        return TaskError(f"{expected}but its shape is {list(loss.shape)}: reduce it with .mean()")
    return TaskError(f"{expected}but it returned a {type(loss).__name__}: check its return statement")
