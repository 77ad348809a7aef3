"""Metrics, media and hyperparameters for TensorBoard.

The messages are TensorBoard's protocol buffers. This module frames them as records, and `RecordFile` appends each at
once. TensorBoard's `EventFileWriter` would keep records for up to two minutes in a thread, and raise in the caller once
a write has failed, as on a full disk. Its `RecordWriter` computes checksums in Python: 0.1 s per megabyte of media, in
which training waits for the GIL.

Why it is like this: docs/adr/0035-what-stays-ours.md.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import shlex
import socket
import struct
import threading
import time
import wave
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import google_crc32c

from hpctrain.files import read_json_or_empty
from hpctrain.metrics.sink import RecordFile
from hpctrain.run.config_change import trained_varied
from hpctrain.run.directory import RunDirectory
from hpctrain.run.evaluation import is_evaluation
from hpctrain.run.file_system import explain

if TYPE_CHECKING:
    # at run time NumPy comes with the first medium only
    from hpctrain.metrics.media_files import Medium


logger = logging.getLogger(__name__)

_MIN_INTERVAL_S = 0.1
"""Seconds between training records. Each is a write to a file system, and TensorBoard draws only a thousand points."""

HyperparameterValue = str | float | bool


class TensorBoardSink:
    """Writes scalars and media to an event file of this attempt, which the first record creates.

    A resume makes TensorBoard drop later steps in the files of earlier attempts (``purge_step=resume_step+1``), so a
    curve never doubles back. TensorBoard can't drop the evaluation of a step and keep its other records: if the process
    is killed after an evaluation that a stop put off, and before the save that follows it is durable, the next attempt
    repeats that evaluation, and its step has two points.

    If training records follow each other within 0.1 s, only the first is written, and the last one before a `flush` or
    `close`; the metrics file has all of them. Evaluations are written at once.

    While the file system fails, training continues (see `RecordFile`). Threads may share the sink.

    Args:
        directory: the run's TensorBoard folder; made if it is missing.
        resume_step: the step from which the attempt starts; events of later steps are dropped.
        clock: epoch seconds.
        hyperparameters: of the run, by key, for TensorBoard's page HParams; empty for none.
    """

    def __init__(
        self,
        directory: Path,
        resume_step: int,
        clock: Callable[[], float] = time.time,
        *,
        hyperparameters: Mapping[str, HyperparameterValue] | None = None,
    ) -> None:
        self._directory = directory
        self._purge_step = resume_step + 1
        self._clock = clock
        self._hyperparameters = hyperparameters or {}
        self._file: RecordFile | None = None
        self._failing = False
        self._logged_at = float("-inf")
        self._pending_record: tuple[int, float, Mapping[str, float]] | None = None
        # another thread encodes and writes media
        self._lock = threading.Lock()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append one event with all values of the step; one that comes too soon after the last one may be left out."""
        now = self._clock()
        if not is_evaluation(values):
            is_early = 0 <= now - self._logged_at < _MIN_INTERVAL_S
            self._pending_record = (step, now, values) if is_early else None
            if is_early:
                return
        self._logged_at = now
        self._append_values(step, now, values)

    def media(self, medium: Medium) -> None:
        """Append one event with a medium."""
        event = _event(medium.time, medium.step)
        _add_medium(event.summary, medium)
        self._append(event)

    def complete(self) -> None:
        """Mark the run as completed on the page HParams."""
        if self._hyperparameters:
            from tensorboard.plugins.hparams.api_pb2 import STATUS_SUCCESS
            from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

            data, now = HParamsPluginData(), self._clock()
            data.session_end_info.status = STATUS_SUCCESS
            data.session_end_info.end_time_secs = now
            self._append(_hparams_event(now, "session_end_info", data))

    def flush(self) -> None:
        """Make the events durable; a failure is a warning."""
        self._append_pending_record()
        with self._lock:
            if self._file is not None:
                self._file.sync()

    def close(self) -> None:
        """Flush and close the file."""
        self._append_pending_record()
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _append_pending_record(self) -> None:
        if self._pending_record is not None:
            self._append_values(*self._pending_record)
            self._pending_record = None

    def _append_values(self, step: int, logged_at: float, values: Mapping[str, float]) -> None:
        event = _event(logged_at, step)
        for name, value in values.items():
            event.summary.value.add(tag=name, simple_value=value)
        self._append(event)

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
        # TensorBoard drops points from purge_step on at each session start but the first: so the first file needs one
        start = SessionLog(status=SessionLog.START)
        purge = Event(wall_time=self._clock(), step=self._purge_step, session_log=start)
        file.append(frame(purge.SerializeToString()))
        if self._hyperparameters:
            file.append(frame(self._session_start().SerializeToString()))
        return file

    def _session_start(self) -> Any:
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

        data, now = HParamsPluginData(), self._clock()
        data.session_start_info.start_time_secs = now
        fields = {bool: "bool_value", str: "string_value"}
        for key, value in self._hyperparameters.items():
            setattr(data.session_start_info.hparams[key], fields.get(type(value), "number_value"), value)
        return _hparams_event(now, "session_start_info", data)


def _hparams_event(time: float, name: str, data: Any) -> Any:
    # without `tensorboard.plugins.hparams.summary_v2`, whose import would take 0.2 s of every attempt
    event = _event(time, 0)
    value = event.summary.value.add(tag=f"_hparams_/{name}")
    value.metadata.plugin_data.plugin_name = "hparams"
    value.metadata.plugin_data.content = data.SerializeToString()
    # the page shows only summaries that have a tensor, whatever it contains
    value.tensor.dtype = 1  # DT_FLOAT
    value.tensor.tensor_shape.dim.add(size=0)
    return event


def _event(wall_time: float, step: int) -> Any:
    # 10 ms for the protocol alone; `torch.utils.tensorboard` takes 0.1 s, and imports TensorFlow if it is there
    from tensorboard.compat.proto.event_pb2 import Event

    return Event(wall_time=wall_time, step=step)


def _add_medium(summary: Any, medium: Medium) -> None:
    """Add a medium to an event's summary as `torch.utils.tensorboard.SummaryWriter` does."""
    if medium.kind in ("image", "figure"):
        width, height = _png_size(medium.data)
        image = summary.value.add(tag=medium.name).image
        image.width = width
        image.height = height
        image.encoded_image_string = medium.data
    elif medium.kind == "audio":
        _add_audio(summary.value.add(tag=medium.name).audio, medium.data)
    elif medium.kind == "histogram":
        _add_histogram(summary.value.add(tag=medium.name).histo, json.loads(medium.data))
    else:
        is_text = medium.kind == "text"
        text = medium.data if is_text else _markdown(json.loads(medium.data)).encode(errors="replace")
        _add_text(summary.value.add(tag=medium.name), text)


def _png_size(data: bytes) -> tuple[int, int]:
    """Width and height of a PNG; zeros for anything else that a figure's `savefig` has written."""
    if not data.startswith(b"\x89PNG\r\n\x1a\n") or len(data) < 24:
        return 0, 0
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def _add_audio(audio: Any, data: bytes) -> None:
    with wave.open(io.BytesIO(data)) as file:
        audio.sample_rate = file.getframerate()
        audio.num_channels = file.getnchannels()
        audio.length_frames = file.getnframes()
    audio.encoded_audio_string = data
    audio.content_type = "audio/wav"


def _add_histogram(histogram: Any, record: dict[str, Any]) -> None:
    counts, edges = record["counts"], record["edges"]
    histogram.num = sum(counts)
    for name in ("sum", "sum_squares"):
        # null if the sum overflowed: JSON has no infinity
        if record[name] is not None:
            setattr(histogram, name, record[name])
    if counts:
        histogram.min = edges[0]
        histogram.max = edges[-1]
        histogram.bucket_limit.extend(edges[1:])
        histogram.bucket.extend(counts)


def _add_text(value: Any, text: bytes) -> None:
    # without `tensorboard.plugins.text.summary_v2`: it imports fsspec, and a loading process that is forked during that
    # import, and imports fsspec as well, would wait forever
    from tensorboard.plugins.text.plugin_data_pb2 import TextPluginData

    value.metadata.plugin_data.plugin_name = "text"
    value.metadata.plugin_data.content = TextPluginData(version=0).SerializeToString()
    value.tensor.dtype = 7  # DT_STRING
    value.tensor.tensor_shape.dim.add(size=1)
    value.tensor.string_val.append(text)


def _markdown(table: dict[str, Any]) -> str:
    """Return a table, encoded by `media.capture`, as Markdown."""
    rows = [table["columns"], ["---"] * len(table["columns"]), *table["data"]]
    return "\n".join("|" + "|".join(_in_cell(value) for value in row) + "|" for row in rows)


def _in_cell(value: object) -> str:
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ")


def frame(data: bytes) -> bytes:
    """One record, as TensorBoard's `RecordWriter` writes it: length, its checksum, the data, their checksum."""
    length = struct.pack("<Q", len(data))
    return b"".join((length, _masked_crc32c(length), data, _masked_crc32c(data)))


def _masked_crc32c(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


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


NOT_HYPERPARAMETERS = (
    *("run_dir", "run_mode", "name", "nodes", "after", "after_failure"),
    *("cluster", "logger", "health", "notify", "resume", "checkpoint"),
)
"""Keys and groups of keys that say where a run is trained and stored, and not what."""
MOST_CHARS = 200
"""Characters of a value; the page shows it in a cell."""


def hyperparameters(directory: RunDirectory) -> dict[str, str | float | bool]:
    """Return the keys that the run's sweep varied, or without a sweep those that its command set, with their values."""
    overrides = trained_varied(directory)
    if not overrides:
        command = str(read_json_or_empty(directory.manifest).get("command", ""))
        words = (word.lstrip("+").partition("=") for word in _words(command) if not word.startswith("-"))
        overrides = {key: value for key, equals, value in words if equals}
    of_training = {key: value for key, value in overrides.items() if key.partition(".")[0] not in NOT_HYPERPARAMETERS}
    return {key: parse_value(value) for key, value in of_training.items()}


def parse_value(text: str) -> str | float | bool:
    """Return a number or a truth value if the text is one, else the text."""
    try:
        value = json.loads(text)
    except ValueError:
        try:
            return float(text)
        except ValueError:
            return text[:MOST_CHARS]
    return value if isinstance(value, bool | int | float) else text[:MOST_CHARS]


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:
        return []
