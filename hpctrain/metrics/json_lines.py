"""Metrics as JSON lines: one record per logged step, complete or absent."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from hpctrain.files import parse_json, read_lines, write_atomic
from hpctrain.metrics.sink import RecordFile
from hpctrain.run.evaluation import is_evaluation

OWN_FIELDS = ("step", "time", "nonfinite")
"""Fields of a record that aren't metrics."""
WRITE_EVERY_S = 0.1
"""Seconds between writes: one costs as much as a step of a small model, and more on a shared file system."""


class JsonLinesSink:
    """Appends ``{"step": 20, "time": 1763.2, "train/loss": 0.5}`` to a file; time is in epoch seconds.

    JSON has no NaN and no infinity: such a value is null, and the record's ``nonfinite`` spells it, as in
    ``{"step": 20, "time": 1763.2, "train/loss": null, "nonfinite": {"train/loss": "nan"}}``.

    Records that come faster than ten a second are written together, with the first record a tenth of a second later or
    the next `write` or `flush`. While the file system fails, training continues (see `RecordFile`).

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
        self._clock = clock
        # replaced, never truncated: a superseded attempt that still appends then writes to the old, unlinked file
        write_atomic(path, kept_lines(path, resume_step, lambda record: evaluation_due and is_evaluation(record)))
        self._file = RecordFile(path)
        self._waiting: list[tuple[int, float, Mapping[str, float]]] = []
        self._written_at = float("-inf")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append one record."""
        now = self._clock()
        self._waiting.append((step, now, dict(values)))
        # a clock that was set back must not delay records; after an evaluation the next record may come much later
        if not 0 <= now - self._written_at < WRITE_EVERY_S or is_evaluation(values):
            self.write()

    def flush(self) -> None:
        """Make the records durable; a failure is a warning."""
        self.write()
        self._file.sync()

    def close(self) -> None:
        """Flush and close the file."""
        self.write()
        self._file.close()

    def write(self) -> None:
        """Write the records that wait, without making them durable."""
        self._written_at = self._clock()
        if self._waiting:
            self._file.append(b"".join(_line(*one) for one in self._waiting))
            self._waiting.clear()


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
