"""The files of media, their records in media.jsonl, and the thread that encodes and writes them."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hpctrain.files import TEMPORARY_PREFIX, parse_json, read_lines, write_atomic
from hpctrain.metrics.media import KINDS, CapturedMedium
from hpctrain.metrics.sink import RecordFile, kept_lines
from hpctrain.run.file_system import explain
from hpctrain.tasks.log import MediumKind

logger = logging.getLogger(__name__)

MAX_WAITING_BYTES = 64 * 2**20
"""Bytes of media to keep while their folder can't be written; what exceeds them is dropped."""
LONGEST_STEM = 200
"""Characters of a name in a file's name, quoted; file systems allow 255."""


@dataclass(frozen=True, slots=True)
class Medium:
    """A medium that was logged.

    Attributes:
        step: to which it belongs.
        time: when it was logged, in epoch seconds.
        name: as logged, such as `eval/samples`.
        kind: of the medium.
        data: the content of its file.
    """

    step: int
    time: float
    name: str
    kind: MediumKind
    data: bytes


class MediaFiles:
    """Writes media into a folder, and a record of each into a file of JSON lines.

    While the file system fails, training continues: media wait in memory, up to 64 MiB or one that is larger, and
    follow in order. The first failure, the first medium that is dropped, and the recovery are logged as warnings.

    Args:
        folder: of the media; the first one makes it.
        records: media.jsonl; made if it is missing.
        resume_step: records of later steps are dropped, and their files removed.
        evaluation_due: whether `resume_step` will be evaluated again: then those of its evaluation are dropped, too.

    Raises:
        OSError: the records can't be made or replaced.
    """

    def __init__(self, folder: Path, records: Path, resume_step: int, *, evaluation_due: bool = False) -> None:
        self._folder = folder
        self._path = records
        self._waiting: deque[Medium] = deque()
        self._failing = False
        self._dropping = False
        self._drop(resume_step, evaluation_due)
        # opened at once: a superseded attempt that writes its first medium later must not find a newer attempt's file
        self._records = RecordFile(records)

    def write(self, medium: Medium) -> None:
        """Write a medium, after any that wait in memory."""
        if not self._has_room(medium):
            self._write_waiting()
        if self._has_room(medium):
            self._waiting.append(medium)
        elif not self._dropping:
            logger.warning(
                "too many media wait in memory: %s of step %d is dropped, and perhaps later ones",
                medium.name,
                medium.step,
            )
            self._dropping = True
        self._write_waiting()

    def sync(self) -> None:
        """Make the media durable; a failure is a warning."""
        self._write_waiting()
        self._records.sync()

    def close(self) -> None:
        """Sync and close."""
        self._write_waiting()
        self._records.close()

    def _has_room(self, medium: Medium) -> bool:
        waiting_bytes = sum(len(waiting.data) for waiting in self._waiting)
        return not self._waiting or waiting_bytes + len(medium.data) <= MAX_WAITING_BYTES

    def _write_waiting(self) -> None:
        try:
            while self._waiting:
                self._write_medium(self._waiting[0])
                self._waiting.popleft()
        except OSError as error:
            if not self._failing:
                why = explain(error, self._folder)
                logger.warning("%s can't be written (%s): media wait in memory", self._folder, why)
            self._failing = True
            return
        if self._failing:
            logger.warning("%s can be written again", self._folder)
            self._failing = self._dropping = False

    def _write_medium(self, medium: Medium) -> None:
        name = file_name(medium.name, medium.step, medium.kind)
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        # durable here, in the background, rather than in a save, which the training waits for
        write_atomic(path, medium.data)
        self._records.append(_line(medium, f"{self._folder.name}/{name}"))

    def _drop(self, resume_step: int, evaluation_due: bool) -> None:
        files = set(map(_file_of, read_lines(self._path, at_most=None)))
        remaining_lines = kept_lines(
            self._path, resume_step, lambda record: evaluation_due and _is_of_evaluation(record)
        )
        # replaced, never truncated: a superseded attempt that still appends then writes to the old, unlinked file
        write_atomic(self._path, remaining_lines)
        staying = set(map(_file_of, read_lines(self._path, at_most=None)))
        for name in files - staying - {None}:
            with suppress(OSError):
                (self._folder / str(name)).unlink()
        for leftover in self._folder.glob(f"*/{TEMPORARY_PREFIX}*"):
            with suppress(OSError):
                leftover.unlink()


def file_name(name: str, step: int, kind: MediumKind) -> str:
    """Return the file of a medium within the folder: ``eval/samples_00000120.png``; different for different names.

    It contains the step, so that an attempt that repeats a step replaces its files.
    """
    phase, _, title = name.partition("/")
    stem = quote(title, safe=" ")
    if len(stem) > LONGEST_STEM:
        stem = f"{stem[:LONGEST_STEM]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    # quote leaves dots as they are
    folder = quote(phase, safe="").replace(".", "%2E")
    return f"{folder}/{stem}_{step:08d}.{KINDS[kind].suffix}"


def _line(medium: Medium, file: str) -> bytes:
    record = {
        "step": medium.step,
        "time": round(medium.time, 3),
        "name": medium.name,
        "kind": medium.kind,
        "file": file,
    }
    return json.dumps(record).encode() + b"\n"


def _file_of(line: bytes) -> str | None:
    """The file of a record, by its name and step: what the record says may be a path to anywhere."""
    try:
        record: Any = parse_json(line)
        return file_name(str(record["name"]), int(record["step"]), record["kind"])
    except (ValueError, KeyError, TypeError):
        return None


def _is_of_evaluation(record: dict[str, Any]) -> bool:
    return str(record.get("name")).startswith("eval/")


MAX_QUEUED_BYTES = 256 * 2**20
"""Bytes of copied media that may wait for the thread; the next call waits until there is room.

Media that come faster than they can be written slow the training down: none is left out, or a run that was interrupted
would have other media than one that wasn't.
"""
MAX_QUEUED = 256
"""Media that may wait for the thread: a save waits for them, and a slow disk takes 20 ms for each."""


class MediaWriter:
    """Encodes media, writes their files, and passes them on, in a thread. Python waits for the thread at its exit.

    Args:
        files: to write.
        receivers: called with each medium after it is written, in the thread; they don't raise.
    """

    def __init__(self, files: MediaFiles, receivers: Sequence[Callable[[Medium], None]] = ()) -> None:
        self._files = files
        self._receivers = receivers
        self._thread = ThreadPoolExecutor(1, "media")
        # each with its bytes; never empty after the first one, as written media leave only when another comes
        self._queued: deque[tuple[Future[None], int]] = deque()

    def put(self, step: int, name: str, captured: CapturedMedium) -> None:
        """Queue a medium; wait until there is room for it.

        Args:
            step: to which it belongs.
            name: as logged, such as `eval/samples`.
            captured: its content.
        """
        while self._queued and (self._queued[0][0].done() or not self._has_room(captured)):
            self._queued.popleft()[0].result()
        future = self._thread.submit(self._write, step, time.time(), name, captured)
        self._queued.append((future, captured.num_bytes))

    def flush(self) -> None:
        """Wait until all media are written and durable; a failure of the file system is a warning."""
        if self._queued:
            wait(future for future, _ in self._queued)
            self._files.sync()

    def close(self) -> None:
        """Write what is queued, and end the thread."""
        self._thread.shutdown()
        self._files.close()

    def _has_room(self, captured: CapturedMedium) -> bool:
        queued_bytes = sum(num_bytes for _, num_bytes in self._queued)
        return len(self._queued) < MAX_QUEUED and queued_bytes + captured.num_bytes <= MAX_QUEUED_BYTES

    def _write(self, step: int, logged_at: float, name: str, captured: CapturedMedium) -> None:
        try:
            medium = Medium(step, logged_at, name, captured.kind, captured.encode())
            self._files.write(medium)
            for receive in self._receivers:
                receive(medium)
        except Exception:  # a medium isn't worth a run
            logger.warning("%s of step %d could not be written", name, step, exc_info=True)
