"""Report parameters that a loss trains, and to which it gives no gradient."""

from __future__ import annotations

import logging

from hpctrain.config.parallel import Parallel
from hpctrain.phrases import either, listed
from hpctrain.train.turn import Turn

log = logging.getLogger("hpctrain.train")


def report_unused(turn: Turn, parallel: Parallel) -> None:
    """Log a warning that names the parameters without a gradient, after a backward pass of the turn.

    Args:
        turn: whose gradients are looked at.
        parallel: of the configuration.
    """
    module = turn.module
    unused = [parameter for parameter in module.unfrozen if parameter.grad is None]
    if not unused:
        return
    remedy = "freeze them, unless a later step uses them"
    if module.ddp is not None and not (parallel.find_unused_parameters or parallel.static_graph):
        remedy = "freeze them, or set parallel.find_unused_parameters=true, since DDP refuses the next step otherwise"
    optimizers = [f"optimizer.named.{update.name}" for update in turn.update.updates if update.name]
    log.warning(
        "%s gave no gradient to %s, which %s: %s",
        turn.loss.method,
        listed(module.names_of(unused), shown=5),
        f"{either(optimizers)} trains for it" if optimizers else "it trains",
        remedy,
    )
