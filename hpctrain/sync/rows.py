"""What a run logged, as rows: one per step, with the values of all its records and its media."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

from hpctrain.files import LARGEST_LOG_BYTES, json_lines, open_below, split_lines
from hpctrain.run.directory import RunDirectory
from hpctrain.run.record_fields import COUNT, TIME
from hpctrain.status.metrics import LoggedMetrics, metrics_of


@dataclass(frozen=True, slots=True)
class SentMedium:
    """A medium, as media.jsonl records it.

    Attributes:
        name: as logged, such as `eval/samples`.
        kind: `image`, `figure`, `text`, `histogram`, `audio` or `table`.
        run: to which it belongs.
        file: its path below the run's directory.
    """

    name: str
    kind: str
    run: RunDirectory
    file: str

    @contextmanager
    def copied(self) -> Iterator[Path]:
        """Inside the context, there is a copy of the file in a folder of this process.

        A service's client opens a file by its path, where another user could put a link to a file of this user.

        Raises:
            OSError: the file can't be read, or is a link, or in a folder that is one.
        """
        with open_below(self.run.path, self.file) as file, TemporaryDirectory(prefix="hpctrain-media-") as folder:
            path = Path(folder, Path(self.file).name)
            with path.open("xb") as copy:
                shutil.copyfileobj(file, copy)
            yield path


@dataclass(slots=True)
class Row:
    """A step.

    Attributes:
        step: completed steps.
        time: of its last record, in epoch seconds; 0 if no record has a time.
        values: by the metric's name, NaN and infinities included; of several records with a name, the last counts.
        media: by name.
    """

    step: int
    time: float = 0.0
    values: dict[str, float] = field(default_factory=dict)
    media: dict[str, SentMedium] = field(default_factory=dict)


class GrowingFile:
    """The records of a file of JSON lines that grows, and that a resume replaces.

    Args:
        path: it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = -1
        self._offset = 0
        self._last_line = b""

    def read(self, after: int) -> list[dict[str, Any]] | None:
        """Return the complete records since the last call; None if the file was replaced.

        Args:
            after: leave out the records up to this step: all of a long run may not fit into memory.
        """
        try:
            # opened anew each time: then NFS asks its server for the current size
            file = open_below(self._path.parent, self._path.name, at_most=LARGEST_LOG_BYTES)
        except FileNotFoundError:
            return []
        with file:
            inode = os.fstat(file.fileno()).st_ino
            file.seek(self._offset - len(self._last_line))
            # the number of a removed file may be given to the one that replaces it
            if self._inode not in (-1, inode) or file.read(len(self._last_line)) != self._last_line:
                return None
            self._inode = inode
            records = json_lines(self._complete_lines(file))
            return [record for record in records if COUNT.accepts(record.get("step")) and record["step"] > after]

    def _complete_lines(self, file: BinaryIO) -> Iterator[bytes]:
        # the last line lacks its line break
        for line, _ in pairwise(split_lines(file)):
            self._offset += len(line) + 1
            self._last_line = line + b"\n"
            yield line


class Rows:
    """The rows of a run that weren't taken yet, read again and again while the run trains.

    Args:
        directory: of the run.
        after: the step up to which all rows were sent.
    """

    def __init__(self, directory: RunDirectory, after: int) -> None:
        self._directory = directory
        self._after = after
        self._rows: dict[int, Row] = {}
        self._start_over()

    def read(self) -> None:
        """Read what was logged since the last call."""
        records, media = (file.read(self._after) for file in self._files)
        if records is None or media is None:
            # a resume dropped records: what was read of either file may be void
            self._start_over()
            records, media = (file.read(self._after) for file in self._files)
        for logged in metrics_of(records or []):
            self._add(logged)
        for record in media or []:
            self._add_medium(record)

    def _start_over(self) -> None:
        self._files = GrowingFile(self._directory.metrics), GrowingFile(self._directory.media_records)
        self._rows.clear()

    def before(self, step: int | None) -> list[Row]:
        """Return the rows before a step, or all of them, in the order of their steps."""
        return [self._rows[number] for number in sorted(self._rows) if step is None or number < step]

    def taken(self, rows: Sequence[Row]) -> None:
        """Forget the first rows that `before` returned: they were sent."""
        for row in rows:
            del self._rows[row.step]
        self._after = max(self._after, rows[-1].step)

    def continue_after(self, step: int) -> None:
        """Have the rows after a step, up to which all were sent; what was read isn't read again if it isn't needed."""
        if step < self._after:
            self._start_over()
        for number in [number for number in self._rows if number <= step]:
            del self._rows[number]
        self._after = step

    def __iter__(self) -> Iterator[Row]:
        return iter(self.before(None))

    def _add(self, logged: LoggedMetrics) -> None:
        if logged.step > self._after:
            row = self._rows.setdefault(logged.step, Row(logged.step))
            row.time = logged.time or row.time
            row.values |= logged.values

    def _add_medium(self, record: dict[str, Any]) -> None:
        step, name, kind, file = (record.get(key) for key in ("step", "name", "kind", "file"))
        if not COUNT.accepts(step) or not all(isinstance(text, str) for text in (name, kind, file)):
            return
        # someone may have edited the record: nothing but the run's own media leaves the machine
        if not str(file).startswith(f"{self._directory.media.name}/"):
            return
        if step is not None and step > self._after:
            row = self._rows.setdefault(step, Row(step))
            if not row.time and TIME.accepts(record.get("time")):
                row.time = float(record["time"])
            row.media[str(name)] = SentMedium(str(name), str(kind), self._directory, str(file))
