"""The records of a run's metrics.jsonl."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.files import LARGEST_LOG_BYTES, json_lines, read_bytes, read_json_lines
from hpctrain.run.record_fields import COUNT, TIME, finite_numbers

_NAMES = re.compile(rb'"([^"]*)":')
_NO_METRICS = {b"step", b"time", b"nonfinite"}


@dataclass(frozen=True, slots=True)
class LoggedMetrics:
    """One record.

    Attributes:
        step: the step after which it was logged.
        time: when it was logged, in epoch seconds; None if the record has no time.
        values: by the metric's name, NaN and infinities included.
    """

    step: int
    time: float | None
    values: Mapping[str, float]


NO_METRICS = LoggedMetrics(0, None, {})
"""The last metrics of a run that has logged none."""


def read_metrics(
    path: Path, *, last_bytes: int | None = None, at_most: int | None = LARGEST_LOG_BYTES
) -> Iterator[LoggedMetrics]:
    """Read the records of metrics.jsonl, oldest first; lines that aren't the record of a step are skipped.

    Yields nothing if the file doesn't exist.

    Args:
        path: the file.
        last_bytes: read only this many bytes at the end; None reads the whole file.
        at_most: the largest size, in bytes, of a file that is read as a whole; None for any.
    """
    yield from metrics_of(read_json_lines(path, last_bytes=last_bytes, at_most=at_most))


def metrics_of(records: Iterable[dict[str, Any]]) -> Iterator[LoggedMetrics]:
    """Parse records of metrics.jsonl, which are changed; those that aren't the record of a step are skipped."""
    for record in records:
        step, time = record.pop("step", None), record.pop("time", None)
        if COUNT.accepts(step):
            # JSON has no NaN and no infinity: such a value is null, and spelled out in `nonfinite`
            nonfinite = record.pop("nonfinite", None)
            values = finite_numbers(record)
            if isinstance(nonfinite, dict):
                values |= {name: float(text) for name, text in nonfinite.items() if text in ("nan", "inf", "-inf")}
            yield LoggedMetrics(step, time if TIME.accepts(time) else None, values)


def last_metrics(path: Path, *, last_bytes: int, names: Collection[str] | None = None) -> LoggedMetrics:
    """Read the last value of each metric in the file's tail, with the step and the time of the last record.

    Args:
        path: the file.
        last_bytes: of the tail.
        names: of the metrics that are needed, in ASCII without quotes; the others may be absent. None reads all.

    Returns:
        `NO_METRICS` if the tail has no record, or the file doesn't exist or can't be read.
    """
    data = b""
    with contextlib.suppress(OSError):  # an unreadable file hides only the metrics
        data = read_bytes(path, last_bytes=last_bytes)
    # only the lines with the last value of a name: parsing all of the tail takes ten times as long
    metric_names = set(_NAMES.findall(data)) - _NO_METRICS if names is None else {name.encode() for name in names}
    missing = {b'"%b":' % name for name in metric_names}
    has_escaped_names = names is None and b"\\" in data
    last: LoggedMetrics | None = None
    values: dict[str, float] = {}
    for line in reversed(data.split(b"\n")):
        if last is not None and not has_escaped_names and not any(name in line for name in missing):
            continue
        for record in metrics_of(json_lines([line])):
            last = last or record
            values = {**record.values, **values}
            missing.difference_update(b'"%b":' % name.encode(errors="replace") for name in record.values)
    return NO_METRICS if last is None else LoggedMetrics(last.step, last.time, values)
