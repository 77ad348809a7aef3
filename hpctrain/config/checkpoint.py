"""``conf/checkpoint``: when to save and what to keep. Owner: hpctrain.checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.config import require


@dataclass(kw_only=True, slots=True)
class Checkpoint:
    """Checkpoints; the last step and every stop are always saved."""

    every_steps: int | None = None
    """Steps between saves; null: not by steps."""
    every_min: float | None = 15.0
    """Minutes between saves, by rank zero's clock; null: not by time."""
    auto: bool = False
    """Choose the time between saves from the cost of a save and the run's failure rate; every_min is then ignored."""
    asynchronous: bool = True
    """Write in the background; training only waits for the copy to host memory. false: training waits for the disk."""
    verify: str = "on_load"
    """`on_load`: verify checksums when a checkpoint is read; `after_save`: also after it was written."""
    on_error: str = "fail"
    """If a save fails: `fail` ends the run; `warn` continues, and the next save is the next attempt."""
    keep: int = 2
    """Number of newest checkpoints to keep; the last two intact ones are always kept."""
    keep_every: int | None = None
    """Keep checkpoints whose step is a multiple of this; null: none."""
    keep_best: int = 0
    """Number of checkpoints with the best evaluations to keep; each such evaluation is followed by a save. 0: none."""
    metric: str | None = None
    """Metric that ranks evaluations, as in metrics.jsonl after `eval/`; null: the task's own metric."""
    metric_mode: str | None = None
    """Whether the lowest or the highest metric is best, `min` or `max`; null: as the task defines, `min` for `loss`."""
    safetensors: bool = False
    """Also save the model's weights as model.safetensors, for other programs. Needs `hpctrain[safetensors]`."""

    def __post_init__(self) -> None:
        """Check single values."""
        require.at_least("checkpoint.every_steps", self.every_steps, 1)
        require.above("checkpoint.every_min", self.every_min, 0)
        require.at_least("checkpoint.keep", self.keep, 2)
        require.at_least("checkpoint.keep_every", self.keep_every, 1)
        require.at_least("checkpoint.keep_best", self.keep_best, 0)
        if self.metric_mode is not None:
            require.one_of("checkpoint.metric_mode", self.metric_mode, ("min", "max"))
        require.one_of("checkpoint.verify", self.verify, ("on_load", "after_save"))
        require.one_of("checkpoint.on_error", self.on_error, ("fail", "warn"))
