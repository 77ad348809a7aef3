"""Compare the results of two finished trainings, to the last bit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from hpctrain.files import LARGEST_LOG_BYTES, read_json_lines
from hpctrain.run.checkpoints import CheckpointInfo, newest_intact
from hpctrain.run.directory import RunDirectory
from hpctrain.status.metrics import read_metrics

Metrics = Mapping[str, Mapping[int, float]]
"""Values by name and step."""
COMPARED_FIELDS = {"steps": "step", "samples seen": "samples_seen", "weights digest": "weights_digest"}
"""Fields of the newest checkpoints that are compared: a field of `CheckpointInfo` by its name in the table."""
SPEED = ("throughput/*", "memory/*", "*_per_second", "*_runtime")
"""Patterns of metrics of the machine, which differ from run to run; the last two are those of transformers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """The results of a training that must not depend on interruptions.

    Attributes:
        newest: the newest intact checkpoint; None without one.
        metrics: name -> step -> value, without those of the machine.
        samples: step -> rank -> the samples of that step; empty if they weren't recorded.
    """

    newest: CheckpointInfo | None
    metrics: Metrics
    samples: Mapping[int, Mapping[int, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Row:
    """One compared quantity.

    Attributes:
        what: name of the quantity.
        straight: its value in the uninterrupted run, as text.
        interrupted: its value in the interrupted run.
        equal: whether they are the same, to the last bit.
        difference: what differs, as text, such as the first difference in a series.
        relative: the largest relative difference; None if there is none, or if the values can't be compared.
    """

    what: str
    straight: str
    interrupted: str
    equal: bool
    difference: str = ""
    relative: float | None = None

    def is_within(self, tolerance: float) -> bool:
        """Whether the values are equal, or their relative difference is at most this."""
        return self.equal or (self.relative is not None and self.relative <= tolerance)


def read_result(directory: RunDirectory) -> TrainingResult:
    """Read a run's metrics, its sample logs, and every byte of its newest checkpoint."""
    newest, _ = newest_intact(directory)
    return TrainingResult(newest=newest, metrics=metrics_of(directory), samples=_samples(directory))


def compare(straight: TrainingResult, interrupted: TrainingResult) -> list[Row]:
    """Compare everything that an exact resume must not change."""
    one, other = straight, interrupted
    rows = [
        compare_values(what, getattr(one.newest, field, None), getattr(other.newest, field, None))
        for what, field in COMPARED_FIELDS.items()
    ]
    rows += compare_metrics(one.metrics, other.metrics)
    if one.samples or other.samples:
        rows.append(_compare_samples(one.samples, other.samples))
    return rows


def compare_metrics(one: Metrics, other: Metrics) -> list[Row]:
    """Compare each series of metrics, step by step."""
    names = sorted(one.keys() | other.keys())
    return [_compare_series(name, one.get(name, {}), other.get(name, {})) for name in names]


def metrics_of(directory: RunDirectory, ignored: Sequence[str] = ()) -> dict[str, dict[int, float]]:
    """Read a run's metrics: name -> step -> value, without those of the machine.

    Args:
        directory: of the run.
        ignored: patterns of the names of further metrics to leave out.
    """
    found: dict[str, dict[int, float]] = {}
    for record in read_metrics(directory.metrics):
        for name, value in record.values.items():
            if not any(fnmatchcase(name, pattern) for pattern in (*SPEED, *ignored)):
                found.setdefault(name, {})[record.step] = value
    return found


def _samples(directory: RunDirectory) -> dict[int, dict[int, tuple[int, ...]]]:
    found: dict[int, dict[int, tuple[int, ...]]] = {}
    for rank in directory.ranks_with(directory.sample_log("*")):
        for record in read_json_lines(directory.sample_log(rank), at_most=LARGEST_LOG_BYTES):
            # if a step was repeated, its last record counts
            found.setdefault(int(record["step"]), {})[rank] = tuple(record["samples"])
    return found


def compare_values(what: str, one: object, other: object) -> Row:
    """Compare two values; None stands for a missing one."""
    # a value that both runs lack isn't evidence of equality
    equal = one == other and one is not None
    left, right = ("-" if value is None else str(value) for value in (one, other))
    return Row(what, left, right, equal)


def _compare_series(what: str, one: Mapping[int, float], other: Mapping[int, float]) -> Row:
    left, right = (f"{values[max(values)]:.6g}, {len(values)} values" if values else "-" for values in (one, other))
    found = _first_difference(one, other)
    if found is None:
        return Row(what, left, right, equal=True)
    step, mine, theirs = found
    difference = f"first after step {step}: {mine} and {theirs}"
    return Row(what, left, right, equal=False, difference=difference, relative=_largest_relative(one, other))


def _compare_samples(one: Mapping[int, object], other: Mapping[int, object]) -> Row:
    left, right = (f"of {len(steps)} steps" for steps in (one, other))
    found = _first_difference(one, other)
    return Row("samples by rank", left, right, found is None, "" if found is None else f"first in step {found[0]}")


def _largest_relative(one: Mapping[int, float], other: Mapping[int, float]) -> float | None:
    """The largest relative difference of two values of one step; None if a value is missing, NaN or infinite."""
    if one.keys() != other.keys() or not all(map(math.isfinite, (*one.values(), *other.values()))):
        return None
    pairs = [(value, other[step]) for step, value in one.items() if value != other[step]]
    return max((abs(a - b) / max(abs(a), abs(b)) for a, b in pairs), default=0.0)


def _first_difference(one: Mapping[int, object], other: Mapping[int, object]) -> tuple[int, str, str] | None:
    for step in sorted(one.keys() | other.keys()):
        mine, theirs = (repr(values[step]) if step in values else "nothing" for values in (one, other))
        # as text, which is exact, because NaN isn't equal to itself
        if mine != theirs:
            return step, mine, theirs
    return None
