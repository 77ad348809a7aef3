"""Where the metrics of an attempt go."""

from __future__ import annotations

import sys
from typing import TextIO

from hpctrain.config.logger import Logger
from hpctrain.metrics.console import ConsoleSink
from hpctrain.metrics.json_lines import JsonLinesSink
from hpctrain.metrics.sink import Sink
from hpctrain.metrics.tensorboard import TensorBoardSink
from hpctrain.run.directory import RunDirectory


def open_sinks(
    logger: Logger,
    directory: RunDirectory,
    *,
    step: int,
    total_steps: int,
    evaluation_due: bool,
    log_stream: TextIO | None,
) -> list[Sink]:
    """Rank zero's sinks; what later steps of an earlier attempt left in them is dropped.

    Args:
        logger: what is wanted.
        directory: of the run.
        step: completed steps from which the attempt starts.
        total_steps: where the run ends.
        evaluation_due: the evaluation of ``step`` is done again.
        log_stream: the rank's log, where standard output doesn't go there already.
    """
    sinks: list[Sink] = [
        JsonLinesSink(directory.metrics, step, evaluation_due=evaluation_due),
        ConsoleSink(sys.stdout, total_steps, step),
    ]
    if log_stream is not None:
        sinks.append(ConsoleSink(log_stream, total_steps, step))
    if logger.tensorboard:
        sinks.append(TensorBoardSink(directory.tensorboard, step))
    return sinks
