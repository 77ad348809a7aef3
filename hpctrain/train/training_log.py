"""The log of a training: metrics for rank zero's sinks, and the samples of every step."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Container, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TextIO

from hpctrain.data.micro_batch import MicroBatch
from hpctrain.files import missing_line_break, write_atomic
from hpctrain.metrics.csv_file import CsvSink
from hpctrain.metrics.media_files import MediaFiles, MediaWriter
from hpctrain.metrics.meter import Throughput
from hpctrain.metrics.progress import Bar, BarSink, ConsoleSink
from hpctrain.metrics.sink import JsonLinesSink, RecordFile, Sink, kept_lines
from hpctrain.metrics.tensorboard import TensorBoardSink, hyperparameters
from hpctrain.run.directory import RunDirectory
from hpctrain.run.times import Times
from hpctrain.status.metrics import read_metrics
from hpctrain.train.checkpointing import StartPoint
from hpctrain.train.profiling.profiler import Profiler
from hpctrain.train.training import Training


class TrainingLog:
    """The metrics of one attempt.

    Args:
        training: what is trained.
        start: where the attempt starts.
        profiler: adds its own metrics.
        times: of this attempt.

    Attributes:
        show_step: to be called after each step; None unless a bar shows the progress.
    """

    def __init__(self, training: Training, start: StartPoint, profiler: Profiler, times: Times) -> None:
        self.show_step: Callable[[int], None] | None = None
        self._training = training
        self._start = start
        self._profiler = profiler
        self._times = times
        self._throughput = Throughput(training.data.samples_seen(start.step), times.training_s)
        self._sinks: list[Sink] = []
        self._tensorboard: TensorBoardSink | None = None
        self._media: MediaWriter | None = None

    @contextmanager
    def opened(self, directory: RunDirectory, log_stream: TextIO | None, bar: Bar | None) -> Iterator[None]:
        """Open the sinks on rank zero, and close them afterwards.

        Records of an earlier attempt after the step from which this one starts are dropped.

        Args:
            directory: of the run.
            log_stream: the rank's log, if standard output doesn't go there already.
            bar: shows the progress on standard output; None for plain lines.
        """
        if self._training.world.is_rank_zero:
            self._sinks = self._open_sinks(directory, log_stream, bar)
        self._throughput.rate(self._training.data.samples_seen(self._start.step))  # opening them doesn't count
        try:
            with self._training.task_log.training(self._media):
                yield
        finally:
            # before the sinks, to which it passes media on
            if self._media is not None:
                self._media.close()
            for sink in self._sinks:
                sink.close()

    def _open_sinks(self, directory: RunDirectory, log_stream: TextIO | None, bar: Bar | None) -> list[Sink]:
        step, total_steps = self._start.step, self._training.total_steps
        # without a log of its own, this process prints into the log
        console: Sink = ConsoleSink(sys.stdout, total_steps, step, stamped=log_stream is None)
        if bar is not None:
            console = bar_sink = BarSink(bar, total_steps, step)
            self.show_step = bar_sink.show_step
        evaluation_due = self._start.evaluation_due
        sinks: list[Sink] = [JsonLinesSink(directory.metrics, step, evaluation_due=evaluation_due), console]
        if log_stream is not None:
            sinks.append(ConsoleSink(log_stream, total_steps, step, stamped=True))
        if self._training.config.logger.csv:
            sinks.append(CsvSink(directory.metrics_csv, partial(read_metrics, directory.metrics, at_most=None)))
        files = MediaFiles(directory.media, directory.media_records, step, evaluation_due=evaluation_due)
        if self._training.config.logger.tensorboard:
            self._tensorboard = TensorBoardSink(directory.tensorboard, step, hyperparameters=hyperparameters(directory))
            sinks.append(self._tensorboard)
        self._media = MediaWriter(files, [] if self._tensorboard is None else [self._tensorboard.media])
        return sinks

    def training(self, step: int) -> dict[str, float]:
        """Log the metrics since the last call; collective.

        Args:
            step: completed steps.

        Returns:
            The values by name.
        """
        training = self._training
        values = training.meter.means(of_none=False)
        training.meter.reset()
        if len(training.step.turns) > 1 and (total := training.step.total_loss(values)) is not None:
            values["train/loss"] = total
        samples_per_s = self._throughput.rate(training.data.samples_seen(step))
        values |= training.step.metrics
        values["train/epoch"] = step / training.data.plan.steps_per_epoch
        values["throughput/samples_per_s"] = samples_per_s
        values |= self._profiler.metrics(step, samples_per_s)
        begin = time.monotonic()
        training.task_log.media.release()
        self._write(step, values)
        self._profiler.logging_s += time.monotonic() - begin
        return values

    def evaluation(self, step: int, means: Mapping[str, float]) -> None:
        """Log the means of the evaluation after ``step`` steps, and the media that the task logged in it."""
        self._training.task_log.media.release()
        self._write(step, means)

    def flush(self) -> None:
        """Make the records and media so far durable."""
        self._training.task_log.media.release()
        # it passes media on to a sink
        if self._media is not None:
            self._media.flush()
        for sink in self._sinks:
            sink.flush()

    def complete(self) -> None:
        """Mark the run as completed, where a sink has a place for it."""
        if self._tensorboard is not None:
            self._tensorboard.complete()

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        self._training.task_log.require_no_medium(values)
        self._times.record(step)
        for sink in self._sinks:
            sink.log(step, values)


def cut_sample_logs(directory: RunDirectory, ranks: Container[int], start_step: int) -> None:
    """Drop the lines of the steps that this attempt repeats from the sample logs of ranks that no longer write one.

    Args:
        directory: of the run.
        ranks: that write one in this attempt.
        start_step: completed steps.
    """
    for file in directory.logs.glob(directory.sample_log("*").name):
        rank = file.stem.rpartition("_")[2]
        if not rank.isdecimal() or int(rank) in ranks:
            continue
        remaining_lines = partial(kept_lines, file, start_step, lambda _: False)
        if sum(map(len, remaining_lines())) < file.stat().st_size:
            # replaced, never truncated: a superseded attempt that still appends then writes to the old, unlinked file
            write_atomic(file, remaining_lines())


def log_samples(
    micro_batches: Generator[MicroBatch, None, None], file: Path, start_step: int
) -> Generator[MicroBatch, None, None]:
    """Return the same micro-batches, and record the samples of each step as it consumes them.

    A line is ``{"step": 20, "samples": [5, 811]}``: one rank's samples, in the order in which it took them, of the step
    as metrics.jsonl counts it. If an attempt repeats a step, the last line counts. While the file system fails, lines
    wait in memory (see `RecordFile`).

    Args:
        micro_batches: of one rank, from the step after ``start_step`` on.
        file: appended to.
        start_step: completed steps.
    """
    step, samples = start_step + 1, list[int]()
    with file.open("a+b") as before:
        line_break = missing_line_break(before.fileno())
    with closing(micro_batches), closing(RecordFile(file)) as lines:
        lines.append(line_break)
        for micro_batch in micro_batches:
            samples += micro_batch.indices[: micro_batch.num_samples].tolist()
            if micro_batch.is_last:
                lines.append(json.dumps({"step": step, "samples": samples}).encode() + b"\n")
                step, samples = step + 1, []
            yield micro_batch
