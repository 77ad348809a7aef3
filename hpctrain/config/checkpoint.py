"""``conf/checkpoint``: when to save and what to keep. Owner: hpctrain.checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from hpctrain.config import require

EVAL_PREFIX = "eval/"
"""Begins the name under which a metric of the evaluation is logged."""


@dataclass(kw_only=True, slots=True)
class Checkpoint(require.Checked):
    """Checkpoints; the last step and every stop are always saved."""

    every_steps: Annotated[int | None, require.at_least(1)] = None
    """Steps between saves; null: not by steps."""
    every_min: Annotated[float | None, require.above(0)] = 15.0
    """Minutes between saves, by rank zero's clock; null: not by time."""
    auto: bool = False
    """Choose the time between saves from the cost of a save and the run's failure rate; every_min is then ignored."""
    asynchronous: bool = True
    """Write in the background; training only waits for the copy to host memory. false: training waits for the disk."""
    verify: Annotated[str, require.one_of("on_load", "after_save")] = "on_load"
    """`on_load`: verify checksums when a checkpoint is read; `after_save`: also after it was written."""
    on_error: Annotated[str, require.one_of("fail", "warn")] = "fail"
    """If a save fails: `fail` ends the run; `warn` logs a warning, and training continues until the next save."""
    keep: Annotated[int, require.at_least(2)] = 2
    """Number of newest checkpoints to keep; the last two intact ones are always kept."""
    keep_every: Annotated[int | None, require.at_least(1)] = None
    """Keep checkpoints whose step is a multiple of this; null: none."""
    keep_best: Annotated[int | None, require.at_least(0)] = None
    """Number of checkpoints with the best evaluations to keep; each such evaluation is followed by a save. 0: none;
    null: 1 if the run evaluates and its metric has a mode (min or max), else 0."""
    metric: str | None = None
    """Metric that ranks evaluations, such as accuracy (eval/accuracy means the same); null: the task's own metric."""
    metric_mode: Annotated[str | None, require.one_of("min", "max")] = None
    """Whether the lowest or the highest metric is best, `min` or `max`; null: as the task defines, `min` for `loss`."""
    safetensors: bool = False
    """Also save the model's weights as model.safetensors, for other programs."""
    writers: Annotated[int, require.at_least(1, at_most=64)] = 1
    """With `parallel=mesh`: files that each rank writes side by side, for file systems that are slow for each file."""

    def __post_init__(self) -> None:
        """Also accept the name under which the metric is logged."""
        require.Checked.__post_init__(self)
        self.metric = None if self.metric is None else self.metric.removeprefix(EVAL_PREFIX)
