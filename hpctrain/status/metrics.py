"""The records of a run's metrics.jsonl."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.files import read_json_lines
from hpctrain.run.record_fields import COUNT, TIME, finite_numbers


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


def read_metrics(path: Path, *, last_bytes: int | None = None) -> Iterator[LoggedMetrics]:
    """Read the records of metrics.jsonl, oldest first; lines that aren't the record of a step are skipped.

    Yields nothing if the file doesn't exist.

    Args:
        path: the file.
        last_bytes: read only this many bytes at the end; None reads the whole file.
    """
    yield from metrics_of(read_json_lines(path, last_bytes=last_bytes))


def metrics_of(records: Iterable[dict[str, Any]]) -> Iterator[LoggedMetrics]:
    """Parse records of metrics.jsonl, which are changed; those that aren't the record of a step are skipped."""
    for record in records:
        step, time = record.pop("step", None), record.pop("time", None)
        if COUNT.accepts(step):
            # JSON has no NaN and no infinity: such a value is null, and spelled out in `nonfinite`
            nonfinite = record.pop("nonfinite", None)
            named = nonfinite.items() if isinstance(nonfinite, dict) else ()
            spelled = {name: float(text) for name, text in named if text in ("nan", "inf", "-inf")}
            yield LoggedMetrics(step, time if TIME.accepts(time) else None, finite_numbers(record) | spelled)
