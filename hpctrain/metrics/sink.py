"""The protocol of metric sinks, the file to which they append records, and the sink of metrics.jsonl."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from hpctrain.files import parse_json, read_lines, write_atomic
from hpctrain.phrases import byte_size
from hpctrain.run.evaluation import is_evaluation
from hpctrain.run.file_system import explain

logger = logging.getLogger(__name__)

MAX_PENDING_BYTES = 16 * 2**20
"""Bytes to keep while the file can't be written, about a hundred thousand records; what exceeds them is dropped."""


class Sink(Protocol):
    """A destination for metrics, on rank zero only, opened in `train.training_log.TrainingLog._open_sinks`.

    No method is collective. A resume drops the records after its step (`kept_lines`), and a resume from step 0 moves
    the file aside (`run.gone_checkpoints.move_records_aside`): a new sink takes part in both.

    Metric names: ``train/loss``, ``train/lr``, ``train/epoch``, ``eval/loss``, ``eval/accuracy``,
    ``throughput/samples_per_s``, and those of the task.
    """

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of a step. Steps never decrease within an attempt; one step may come in several calls."""

    def flush(self) -> None:
        """Make the records durable; called before a checkpoint is published, so that a resume misses no record."""

    def close(self) -> None:
        """Flush and release; nothing is logged afterwards."""


class RecordFile:
    """Appends whole records to a file, each in one write, without blocking while the file system fails.

    While it fails (full, read-only, unmounted), records wait in memory, up to 16 MiB or one that is larger, and follow
    in order as soon as a write succeeds; a record that was written in part is completed. The first failure, the first
    record that is dropped, and the recovery are logged as warnings.

    Args:
        path: an existing file; only this process writes it.

    Raises:
        OSError: the file can't be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pending = b""
        self._failing = False
        self._dropping = False
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)

    @property
    def is_behind(self) -> bool:
        """Whether records wait in memory."""
        return bool(self._pending)

    def append(self, record: bytes) -> None:
        """Write one record, after any that wait in memory."""
        if not self._has_room(record):
            self._write_pending()
        if self._has_room(record):
            self._pending += record
        elif not self._dropping:
            logger.warning("%s: too many records wait in memory, so some are dropped", self._path)
            self._dropping = True
        self._write_pending()

    def _has_room(self, record: bytes) -> bool:
        return not self._pending or len(self._pending) + len(record) <= MAX_PENDING_BYTES

    def _write_pending(self) -> None:
        try:
            while self._pending:
                num_written = os.write(self._descriptor, self._pending)
                self._pending = self._pending[num_written:]
        except OSError as error:
            # not `retry`: waiting for the file system here would block training
            if not self._failing:
                why = explain(error, self._path)
                logger.warning("%s can't be written (%s): records wait in memory", self._path, why)
            self._failing = True
            return
        if self._failing:
            logger.warning("%s can be written again", self._path)
            self._failing = self._dropping = False

    def sync(self) -> None:
        """Make the records durable; a failure is a warning."""
        self.append(b"")
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            logger.warning("%s could not be made durable (%s)", self._path, explain(error, self._path))

    def close(self) -> None:
        """Sync and close; a failure is a warning."""
        self.sync()
        if self._pending:
            logger.warning("%s lacks its last %s: they couldn't be written", self._path, byte_size(len(self._pending)))
        try:
            os.close(self._descriptor)
        except OSError as error:  # NFS reports here what it couldn't store
            logger.warning("%s could not be made durable (%s)", self._path, explain(error, self._path))


OWN_FIELDS = ("step", "time", "nonfinite")
"""Fields of a record that aren't metrics."""
MAX_WAITING = 100_000
"""Records to keep while the file can't be replaced; later ones are left out until the next attempt."""
Record: TypeAlias = tuple[int, float, Mapping[str, float]]
"""Step, time in epoch seconds, and values."""
WRITE_EVERY_S = 0.1
"""Seconds between writes: one costs as much as a step of a small model, and more on a shared file system."""


class RowSink(ABC):
    """A sink that appends a row for each record to a file.

    Records that come faster than ten a second are written together, with the first record a tenth of a second later or
    the next `write` or `flush`. While the file system fails, training continues (see `RecordFile`).

    Args:
        file: appended to.
        clock: epoch seconds.
    """

    def __init__(self, file: RecordFile, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._file = file
        self._waiting: list[Record] = []
        self._written_at = float("-inf")

    @abstractmethod
    def _encode(self, records: list[Record]) -> bytes:
        """The rows of records."""

    def _make_ready(self, records: list[Record], *, at_once: bool) -> bool:  # noqa: ARG002 - for a subclass
        """Make the file ready for records, if it isn't; return whether they can be written now."""
        return True

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append one record."""
        now = self._clock()
        if len(self._waiting) < MAX_WAITING:
            self._waiting.append((step, now, dict(values)))
        # a clock that was set back must not delay records; after an evaluation the next record may come much later
        if not 0 <= now - self._written_at < WRITE_EVERY_S or is_evaluation(values):
            self.write()

    def write(self, *, at_once: bool = False) -> None:
        """Write the records that wait, without making them durable; ``at_once`` if that must not be put off."""
        self._written_at = self._clock()
        if self._waiting and self._make_ready(self._waiting, at_once=at_once):
            self._file.append(self._encode(self._waiting))
            self._waiting.clear()

    def flush(self) -> None:
        """Make the records durable; a failure is a warning."""
        self.write(at_once=True)
        self._file.sync()

    def close(self) -> None:
        """Flush and close the file."""
        self.write(at_once=True)
        self._file.close()


class JsonLinesSink(RowSink):
    """Appends ``{"step": 20, "time": 1763.2, "train/loss": 0.5}`` to a file; time is in epoch seconds.

    JSON has no NaN and no infinity: such a value is null, and the record's ``nonfinite`` spells it, as in
    ``{"step": 20, "time": 1763.2, "train/loss": null, "nonfinite": {"train/loss": "nan"}}``.

    Args:
        path: the file; made if it is missing.
        resume_step: drop records of later steps, and a last line that a crash left incomplete.
        clock: epoch seconds.
        evaluation_due: whether `resume_step` will be evaluated again: then drop the records of its evaluation, too.

    Raises:
        OSError: the file can't be made or replaced.
    """

    def __init__(
        self,
        path: Path,
        resume_step: int,
        clock: Callable[[], float] = time.time,
        *,
        evaluation_due: bool = False,
    ) -> None:
        # replaced, never truncated: a superseded attempt that still appends then writes to the old, unlinked file
        write_atomic(path, kept_lines(path, resume_step, lambda record: evaluation_due and is_evaluation(record)))
        super().__init__(RecordFile(path), clock)

    def _encode(self, records: list[Record]) -> bytes:
        return b"".join(_line(*record) for record in records)


def _line(step: int, logged_at: float, values: Mapping[str, float]) -> bytes:
    record: dict[str, object] = {"step": step, "time": round(logged_at, 3), **values}
    nonfinite = {name: str(float(value)) for name, value in values.items() if not math.isfinite(value)}
    if nonfinite:
        record |= dict.fromkeys(nonfinite)
        record["nonfinite"] = nonfinite
    return json.dumps(record, allow_nan=False).encode() + b"\n"


def kept_lines(path: Path, resume_step: int, is_repeated: Callable[[dict[str, Any]], bool]) -> Iterator[bytes]:
    """Read the complete lines of records up to a step; none if the file doesn't exist.

    Args:
        path: of a file of any size, with JSON records, each with a `step`.
        resume_step: from which an attempt resumes.
        is_repeated: whether the attempt will write a record of this very step again, which is then dropped.
    """
    # the last line lacks its line break
    for line, _ in pairwise(read_lines(path, at_most=None)):
        record = _record(line)
        if record and (record["step"] < resume_step or (record["step"] == resume_step and not is_repeated(record))):
            yield line + b"\n"


def _record(line: bytes) -> dict[str, Any] | None:
    """Parse the record in a line; None if it isn't the record of a step."""
    try:
        record = parse_json(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None
