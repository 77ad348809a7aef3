"""Check in the first updates that checkpoints can hold the state of an optimizer and its schedule, and do."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from hpctrain.checkpoint.host_memory import require_storable
from hpctrain.errors import CheckpointError, TaskError
from hpctrain.phrases import listed
from hpctrain.train.learning_rate import LearningRate

log = logging.getLogger("hpctrain.train")


class StateCheck:
    """Checks the state of one optimizer after its first and its second update in an attempt.

    Args:
        optimizer: whose state is checked.
        learning_rate: its schedule.
        name: of the optimizer among several; empty for the only one.
        warns: whether to log warnings, which one rank does for all.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, learning_rate: LearningRate, *, name: str = "", warns: bool
    ) -> None:
        self._optimizer = optimizer
        self._learning_rate = learning_rate
        self._key = f"optimizer.named.{name}" if name else "optimizer"
        self._warns = warns
        self._first: dict[str, object] | None = None

    def __call__(self) -> bool:
        """Check the state after an update that wasn't skipped.

        Returns:
            Whether the check is done.

        Raises:
            TaskError: a checkpoint can't hold the state; the message names the value's place.
        """
        attributes = _outside_of_checkpoints(self._optimizer)
        if self._first is None:
            self._require_storable()
            self._first = attributes
            return False
        # only now: what the first update adds may be constant from then on
        lost = [name for name, value in attributes.items() if value is None or value != self._first.get(name)]
        if lost and self._warns:
            log.warning(
                "%s: updates change %s of %s, which checkpoints don't have: a resume won't be exact; keep such values "
                "in the optimizer's state or param_groups, or override its state_dict and load_state_dict",
                self._key,
                listed(lost),
                type(self._optimizer).__name__,
            )
        return True

    def _require_storable(self) -> None:
        kind = type(self._optimizer).__name__
        states = {
            f"{self._key}: {kind}.state_dict()": self._optimizer.state_dict(),
            f"{self._key}: the state of its schedule": self._learning_rate.state_dict(),
        }
        for name, state in states.items():
            try:
                require_storable(state, name)
            except CheckpointError as error:
                raise TaskError(str(error)) from None


def _outside_of_checkpoints(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return fingerprints of the attributes that no state dict has, by name; None for another optimizer's state."""
    kind = type(optimizer)
    if kind.__module__.startswith("torch.optim.") or kind.state_dict is not torch.optim.Optimizer.state_dict:
        return {}
    found: dict[str, Any] = {}
    for name, value in vars(optimizer).items():
        if type(value) in (int, float):
            found[name] = value
        elif isinstance(value, Tensor):
            found[name] = id(value), value._version
        elif isinstance(value, torch.optim.Optimizer) and value.state:
            found[name] = None
    return found
