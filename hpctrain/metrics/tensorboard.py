"""Metrics for TensorBoard.

Event files are written without TensorBoard's own writer, which takes 0.1 s to import, starts a thread, and keeps
records for up to two minutes. A record is 16 bytes of frame around a protocol buffer (TFRecord, as in TensorBoard's
`record_writer.py`).
"""

from __future__ import annotations

import logging
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.metrics.crc32c import crc32c
from hpctrain.metrics.sink import RecordFile
from hpctrain.run.evaluation import is_evaluation
from hpctrain.run.file_system import explain

if TYPE_CHECKING:
    # at run time NumPy comes with the first medium only
    from hpctrain.metrics.media.files import Medium

logger = logging.getLogger(__name__)

_PAUSE_S = 0.1
"""TensorBoard draws a thousand points of a curve by default, and an event costs 0.1 ms."""
_MASK_DELTA = 0xA282EAD8

HyperparameterValue = str | float | bool


class TensorBoardSink:
    """Writes scalars and media to an event file of this attempt, which the first record creates.

    A resume makes TensorBoard drop later steps in the files of earlier attempts (``purge_step=resume_step+1``), so a
    curve never doubles back. TensorBoard can't drop the evaluation of a step and keep its other records: if the
    evaluation will be repeated, all of `resume_step` is dropped, and `repeat` has to bring back the rest.

    Of training records within 0.1 s of each other, the first and the last before a `flush` or `close` are written; the
    metrics file has all of them. Evaluations are written at once.
    While the file system fails, training continues (see `RecordFile`). Threads may share the sink.

    Args:
        directory: the run's TensorBoard folder; made if it is missing.
        resume_step: the step from which the attempt starts; events of later steps are dropped.
        clock: epoch seconds.
        evaluation_due: whether `resume_step` will be evaluated again.
        hyperparameters: of the run, by key, for TensorBoard's page HParams; empty for none.
    """

    def __init__(
        self,
        directory: Path,
        resume_step: int,
        clock: Callable[[], float] = time.time,
        *,
        evaluation_due: bool = False,
        hyperparameters: Mapping[str, HyperparameterValue] | None = None,
    ) -> None:
        self._directory = directory
        self._purge_step = resume_step + (not evaluation_due)
        self._clock = clock
        self._hyperparameters = hyperparameters or {}
        self._file: RecordFile | None = None
        self._failing = False
        self._logged_at = float("-inf")
        self._left_out: tuple[int, float, Mapping[str, float]] | None = None
        # media come from the thread that writes them
        self._lock = threading.Lock()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append one event with all values of the step; one that comes too soon after the last one may be left out."""
        now = self._clock()
        if not is_evaluation(values):
            is_early = 0 <= now - self._logged_at < _PAUSE_S
            self._left_out = (step, now, values) if is_early else None
            if is_early:
                return
        self._logged_at = now
        self.repeat(step, now, values)

    def repeat(self, step: int, logged_at: float, values: Mapping[str, float]) -> None:
        """Append one event with values that were logged at some time, in epoch seconds."""
        event = _event(logged_at, step)
        for name, value in values.items():
            event.summary.value.add(tag=name, simple_value=value)
        self._append(event)

    def media(self, medium: Medium) -> None:
        """Append one event with a medium."""
        from hpctrain.metrics.media.events import add_medium

        event = _event(medium.time, medium.step)
        add_medium(event.summary, medium)
        self._append(event)

    def complete(self) -> None:
        """Mark the run as completed on the page HParams."""
        if self._hyperparameters:
            from hpctrain.metrics.hyperparameters import add_end

            event = _event(self._clock(), 0)
            add_end(event.summary, self._clock())
            self._append(event)

    def flush(self) -> None:
        """Make the events durable; a failure is a warning."""
        self._append_left_out()
        with self._lock:
            if self._file is not None:
                self._file.sync()

    def close(self) -> None:
        """Flush and close the file."""
        self._append_left_out()
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _append_left_out(self) -> None:
        if self._left_out is not None:
            self.repeat(*self._left_out)
            self._left_out = None

    def _append(self, event: Any) -> None:
        with self._lock:
            if self._file is None:
                self._file = self._open()
            if self._file is not None:
                self._file.append(frame(event.SerializeToString()))

    def _open(self) -> RecordFile | None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        try:
            file = RecordFile(make_event_file(self._directory))
        except OSError as error:
            if not self._failing:
                why = explain(error, self._directory)
                logger.warning("no event file can be made in %s (%s); trying again", self._directory, why)
            self._failing = True
            return None
        file.append(frame(Event(wall_time=self._clock(), file_version="brain.Event:2").SerializeToString()))
        # TensorBoard drops points from purge_step on at each session start, except for the first: so the first file has
        # one as well
        start = SessionLog(status=SessionLog.START)
        purge = Event(wall_time=self._clock(), step=self._purge_step, session_log=start)
        file.append(frame(purge.SerializeToString()))
        if self._hyperparameters:
            from hpctrain.metrics.hyperparameters import add_start

            event = Event(wall_time=self._clock())
            add_start(event.summary, self._hyperparameters, self._clock())
            file.append(frame(event.SerializeToString()))
        return file


def _event(wall_time: float, step: int) -> Any:
    # 10 ms for the protocol alone; `torch.utils.tensorboard` takes 0.1 s, and imports TensorFlow if it is there
    from tensorboard.compat.proto.event_pb2 import Event

    return Event(wall_time=wall_time, step=step)


def masked_crc32c(data: bytes) -> int:
    """CRC-32C of ``data``, rotated by 15 bits and offset, as TFRecord requires."""
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF


def frame(data: bytes) -> bytes:
    """One record: length, its checksum, the data, their checksum; little-endian."""
    length = struct.pack("<Q", len(data))
    return b"".join((length, struct.pack("<I", masked_crc32c(length)), data, struct.pack("<I", masked_crc32c(data))))


def event_files(directory: Path) -> list[Path]:
    """The event files in ``directory``, in the order in which TensorBoard reads them."""
    return sorted(directory.glob("events.out.tfevents.*"))


def make_event_file(directory: Path) -> Path:
    """Make an empty event file whose name sorts after all others there, even if an earlier host's clock was ahead.

    Args:
        directory: made if it is missing.

    Raises:
        OSError: it can't be made.
    """
    directory.mkdir(parents=True, exist_ok=True)
    second = int(time.time())
    for path in event_files(directory):
        if match := re.match(r"events\.out\.tfevents\.(\d+)\.", path.name):
            second = max(second, int(match[1]) + 1)
    path = directory / f"events.out.tfevents.{second:010d}.{socket.gethostname()}.{os.getpid()}"
    path.touch(exist_ok=False)
    return path
