"""Find parameters that a loss trains, but to which it gives no gradient."""

from __future__ import annotations

import logging

from hpctrain.config.parallel import Parallel
from hpctrain.errors import TaskError
from hpctrain.phrases import either, listed
from hpctrain.train.turn import Turn

log = logging.getLogger("hpctrain.train")


def check_gradients(turn: Turn, parallel: Parallel, *, warns: bool = True) -> None:
    """Log a warning that names the parameters without a gradient, after a backward pass of the turn.

    Args:
        turn: whose gradients are looked at.
        parallel: of the configuration.
        warns: whether this rank logs.

    Raises:
        TaskError: no parameter has a gradient, or DDP waits for those that are missing, which leaves others unreduced.
    """
    module = turn.module
    # in a pipeline, other ranks train what is on `meta`
    own = [parameter for parameter in module.unfrozen if not parameter.is_meta]
    unused = [parameter for parameter in own if parameter.grad is None]
    if not unused:
        return
    optimizers = [f"optimizer.named.{update.name}" for update in turn.update.updates if update.name]
    names = listed(module.names_of(unused), shown=5)
    trains = f"{either(optimizers)} trains for this loss" if optimizers else "it trains"
    problem = f"{turn.loss.method} gave no gradient to {names}, which {trains}"
    if len(unused) == len(own):
        raise TaskError(f"{problem}: compute the loss with the model that the method gets as its argument")
    if module.ddp is not None and not (parallel.find_unused_parameters or parallel.static_graph):
        raise TaskError(
            f"{problem}: freeze them, or set parallel.find_unused_parameters=true: DDP waits for these gradients"
        )
    if warns:
        log.warning("%s: freeze them, unless a later step uses them", problem)
