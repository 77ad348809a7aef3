"""Metrics for TensorBoard."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from hpctrain.metrics.event_file import event_files, frame, make_event_file
from hpctrain.metrics.patient_file import PatientFile

logger = logging.getLogger(__name__)

_PAUSE_S = 0.1
"""TensorBoard draws a thousand points of a curve (its default), and an event costs it 0.1 ms here."""


class TensorBoardSink:
    """Scalars in an event file of this attempt; the file and the import (10 ms) wait for the first record.

    A resume tells TensorBoard to forget what later steps left in the files of earlier attempts
    (``purge_step=resume_step+1``), so a curve never doubles back; with ``--load_fast=false`` it still shows them.
    Of records that follow each other within 0.1 s only the first is taken, and whatever was evaluated: the metrics file
    has them all. A file that can't be written for a while doesn't stop the training (see `PatientFile`).

    Args:
        directory: the run's TensorBoard folder; made where it isn't there.
        resume_step: the step that the attempt starts from; None forgets all that is there.
        clock: epoch seconds.
    """

    def __init__(self, directory: Path, resume_step: int | None, clock: Callable[[], float] = time.time) -> None:
        self._directory = directory
        self._purge_step = 0 if resume_step is None else resume_step + 1
        self._clock = clock
        self._file: PatientFile | None = None
        self._failing = False
        self._logged_at = float("-inf")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append one event with all values of the step, or leave it out."""
        now = self._clock()
        if 0 <= now - self._logged_at < _PAUSE_S and not any(name.startswith("eval/") for name in values):
            return
        self._logged_at = now
        # The protocol alone: `torch.utils.tensorboard` imports for 0.1 s, and TensorFlow too where there is one.
        from tensorboard.compat.proto.event_pb2 import Event

        if self._file is None:
            self._file = self._open()
        if self._file is not None:
            event = Event(wall_time=now, step=step)
            for name, value in values.items():
                event.summary.value.add(tag=name, simple_value=value)
            self._file.append(frame(event.SerializeToString()))

    def flush(self) -> None:
        """Make the events durable, as far as the file system lets us."""
        if self._file is not None:
            self._file.sync()

    def close(self) -> None:
        """Flush and close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> PatientFile | None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        earlier = event_files(self._directory)
        try:
            file = PatientFile(make_event_file(self._directory))
        except OSError as error:
            if not self._failing:
                logger.warning("%s: no event file can be made (%s); tried again", self._directory, error.strerror)
            self._failing = True
            return None
        file.append(frame(Event(wall_time=self._clock(), file_version="brain.Event:2").SerializeToString()))
        if earlier:
            start = SessionLog(status=SessionLog.START)
            purge = Event(wall_time=self._clock(), step=self._purge_step, session_log=start)
            file.append(frame(purge.SerializeToString()))
        return file
