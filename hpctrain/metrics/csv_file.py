"""Metrics as CSV, with a column for each name that was ever logged."""

from __future__ import annotations

import csv
import io
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path

from hpctrain.files import open_file, write_atomic
from hpctrain.metrics.sink import Record, RecordFile, RowSink
from hpctrain.phrases import spreadsheet_text
from hpctrain.run.file_system import explain
from hpctrain.status.metrics import LoggedMetrics

logger = logging.getLogger(__name__)

BLOCK_BYTES = 2**20

TIME_SHARE = 0.01
"""Largest share of the time that may be spent on adding columns, but for those that a `flush` adds."""


class CsvSink(RowSink):
    """Writes a row for each record of metrics.jsonl: step, time in epoch seconds, and the values by name.

    A record without a value leaves its cell empty. A new name adds a column, for which the whole file is replaced, in
    at most a hundredth of the time: until then rows wait, or until `flush`. While the file system fails, training
    continues, and the first failure is logged as a warning.

    Args:
        path: the file, which is replaced.
        records: reads what earlier attempts logged, up to the step from which this one resumes.
        clock: epoch seconds.

    Raises:
        OSError: the file can't be replaced.
    """

    def __init__(
        self, path: Path, records: Callable[[], Iterable[LoggedMetrics]], clock: Callable[[], float] = time.time
    ) -> None:
        self._path = path
        self._next_columns_s = 0.0
        self._failing = False
        # twice: a long run has more of them than fit into memory
        self._columns = list(dict.fromkeys(name for record in records() for name in record.values))
        rows = (_text([_row(self._columns, metrics.step, metrics.time, metrics.values)]) for metrics in records())
        super().__init__(self._replace_file(chain([_header(self._columns)], rows)), clock)

    def _encode(self, records: list[Record]) -> bytes:
        return _text([_row(self._columns, *record) for record in records])

    def _make_ready(self, records: list[Record], *, at_once: bool) -> bool:
        names = dict.fromkeys(name for _, _, values in records for name in values)
        new = [name for name in names if name not in self._columns]
        return not new or ((at_once or time.perf_counter() >= self._next_columns_s) and self._add_columns(new))

    def _add_columns(self, names: list[str]) -> bool:
        """Replace the file by one with more columns; return whether that succeeded."""
        self._file.append(b"")
        if self._file.is_behind:
            return False
        columns = [*self._columns, *names]
        begin_s = time.perf_counter()
        try:
            # numbers have no line end, so the rows need not be parsed, which takes seconds for a long file
            rows = (block.replace(b"\n", b"," * len(names) + b"\n") for block in self._rows_so_far())
            replaced = self._replace_file(chain([_header(columns)], rows))
        except OSError as error:
            if not self._failing:
                why = explain(error, self._path)
                logger.warning("%s can't be replaced (%s): records wait in memory", self._path, why)
            self._failing = True
            return False
        else:
            self._file.close()
            self._file = replaced
            self._columns = columns
            self._failing = False
            return True
        finally:
            # after a failure, too
            now_s = time.perf_counter()
            self._next_columns_s = now_s + (now_s - begin_s) / TIME_SHARE

    def _rows_so_far(self) -> Iterator[bytes]:
        header = _header(self._columns)
        with suppress(FileNotFoundError), open_file(self._path) as file:
            if file.read(len(header)) == header:
                yield from iter(partial(file.read, BLOCK_BYTES), b"")
                return
        logger.warning(
            "%s was changed by something else: its rows so far are left out; the next attempt writes them again",
            self._path,
        )

    def _replace_file(self, content: Iterable[bytes]) -> RecordFile:
        # replaced, never truncated: a superseded attempt that still appends then writes to the old, unlinked file
        write_atomic(self._path, content, durable=False)  # `flush` makes it durable
        return RecordFile(self._path)


def _header(columns: list[str]) -> bytes:
    return _text([["step", "time", *map(spreadsheet_text, columns)]])


def _row(columns: list[str], step: int, logged_at: float | None, values: Mapping[str, float]) -> list[str]:
    cells = (values.get(name) for name in columns)
    at = "" if logged_at is None else repr(round(logged_at, 3))
    return [str(step), at, *("" if cell is None else repr(cell) for cell in cells)]


def _text(rows: list[list[str]]) -> bytes:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(rows)
    return buffer.getvalue().encode(errors="replace")
