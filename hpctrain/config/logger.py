"""``conf/logger``: what is written down while training. Owner: hpctrain.metrics."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.config import require


@dataclass(kw_only=True, slots=True)
class Logger:
    """metrics.jsonl is always written."""

    every_steps: int = 10
    """Steps between records of the training loss; it is averaged over them and over all ranks."""
    tensorboard: bool = True
    """Also write TensorBoard's event files, by rank zero."""
    measure: bool = True
    """Look at a few steps closely, for the verdict on what holds the run back and for throughput, MFU and memory."""
    samples: bool = False
    """Also write the numbers of each step's samples to logs/samples_RANK.jsonl, by every rank."""

    def __post_init__(self) -> None:
        """Check single values."""
        require.at_least("logger.every_steps", self.every_steps, 1)
