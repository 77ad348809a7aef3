"""The metric by which a run is judged, as far as its configuration and the source of its task's class show it."""

from __future__ import annotations

from hpctrain.config.root import Config
from hpctrain.config.target import constants_of


def metric_mode(config: Config) -> str | None:
    """Return `min` or `max`: which values of the metric are better; None if only the task's class itself can tell."""
    checkpoint = config.checkpoint
    if checkpoint.metric_mode is not None:
        return checkpoint.metric_mode
    own = constants_of(str(config.task["_target_"]))
    if checkpoint.metric in (None, own.get("metric")):
        mode = own.get("metric_mode")
        return mode if mode in ("min", "max") else None
    return "min" if checkpoint.metric == "loss" else None
