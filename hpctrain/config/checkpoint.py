"""``conf/checkpoint``: when to save and what to keep. Owner: hpctrain.checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.config import require


@dataclass(kw_only=True, slots=True)
class Checkpoint:
    """The last step and every stop are always saved."""

    every_steps: int | None = None
    """Steps between saves; null: not by steps."""
    every_min: float | None = 15.0
    """Minutes between saves, by rank zero's clock; null: not by time."""
    auto: bool = False
    """Choose the time between saves by what a save costs and how often this run fails; every_min is then not used."""
    asynchronous: bool = True
    """Write beside training, which stops for the copy to host memory alone; false: training waits for the disk."""
    verify: str = "on_load"
    """`on_load`: checksums are compared when a checkpoint is read; `after_save`: also right after it was written."""
    on_error: str = "fail"
    """A save that the file system refuses: `fail` ends the run, `warn` trains on and tries again at the next save."""
    keep: int = 2
    """Newest checkpoints that are kept; the last two intact ones always are."""
    keep_every: int | None = None
    """Checkpoints whose step is a multiple of this are kept for good; null: none."""

    keep_best: int = 0
    """Checkpoints with the best evaluations are kept, so many; a save follows each that is one of them. 0: none."""
    metric: str | None = None
    """What evaluations are judged by, as metrics.jsonl has it after `eval/`; null: the task's own metric."""
    metric_mode: str | None = None
    """Which values of it are better, `min` or `max`; null: what the task says, `min` for `loss`."""
    safetensors: bool = False
    """Each checkpoint has the model's weights as model.safetensors too, for programs that read no .pt files."""

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
