"""Refuse optimizers that step while a task computes its loss, whose gradients the ranks would not share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hpctrain.errors import TaskError
from hpctrain.train.step import TrainStep


@contextmanager
def foreign_steps_refused(step: TrainStep) -> Iterator[None]:
    """Inside the context, an optimizer that steps while a task computes a loss raises a TaskError.

    Args:
        step: of the training; its own optimizers may step.
    """
    own = {id(update.optimizer) for update in step.updates}

    def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if id(optimizer) in own:
            return
        for turn in step.turns:
            if turn.computing:
                raise TaskError(
                    f"{turn.method} steps an optimizer of its own ({type(optimizer).__name__}), whose gradients the "
                    "ranks don't share and whose state no checkpoint has: name it in the configuration "
                    "(optimizer=named), with a method of the task that returns its loss"
                )

    handle = register_optimizer_step_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()
