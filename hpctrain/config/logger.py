"""``conf/logger``: what is logged during training. Owner: hpctrain.metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from hpctrain.config import require


@dataclass(kw_only=True, slots=True)
class Logger(require.Checked):
    """Logging; metrics.jsonl is always written."""

    every_steps: Annotated[int, require.at_least(1)] = 10
    """Steps between records of the training loss, which is the mean over these steps and all ranks."""
    tensorboard: bool = True
    """Also write TensorBoard's event files."""
    csv: bool = False
    """Also write metrics.csv, a table of metrics.jsonl."""
    measure: bool = True
    """Time a few steps part by part, to find what holds the run back, and log throughput, MFU and memory."""
    samples: bool = False
    """Also write the indices of each step's samples to logs/samples_RANK.jsonl, on every rank."""
