"""Compare the results of two finished runs to the last bit: trainings, and what programs saved last."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import hpctrain
from hpctrain.errors import RunFailedError
from hpctrain.files import LARGEST_LOG_BYTES, read_json_lines
from hpctrain.phrases import counted, listed
from hpctrain.run.checkpoints import CheckpointInfo, newest_intact
from hpctrain.run.directory import RunDirectory
from hpctrain.run.saves import last_save, unreported_files
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


COMPARE = """
import sys
sys.path.append(sys.argv.pop(1))
from hpctrain.checkpoint.compare_saves import main
main(sys.argv[1:])
"""
PACKAGES = Path(hpctrain.__file__).parents[1]
NOT_SAVES = (".json", ".jsonl", ".txt", ".log", ".csv", ".yaml", ".yml", ".toml", ".png", ".html")
"""Endings of files that lie among checkpoints and are not checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveResult:
    """The comparison of two saves: rows of the table, remarks, and why it proves nothing (empty if it does)."""

    rows: tuple[Row, ...] = ()
    notes: tuple[str, ...] = ()
    unproven: str = ""


def compare_last_saves(straight: RunDirectory, interrupted: RunDirectory, ignored: Sequence[str]) -> SaveResult:
    """Compare the tensors of the last saves of two runs.

    They are those that the runs reported. Without reports, they are what the straight run wrote last into its
    checkpoints folder, without texts and links, and the entry of that name in the other run's.

    Args:
        straight: the uninterrupted run.
        interrupted: the interrupted run.
        ignored: patterns of the names of tensors that may differ.

    Raises:
        RunFailedError: the comparison could not be made.
    """
    saves = [last_save(directory) for directory in (straight, interrupted)]
    one, other = (None if save is None else save.path for save in saves)
    if one is None and other is None:
        files = [(changed_at, path) for path, changed_at in unreported_files(straight) if not path.is_symlink()]
        one = max((entry for entry in files if entry[1].suffix not in NOT_SAVES), default=(0.0, None))[1]
        if one is not None and (interrupted.checkpoints / one.name).exists():
            other = interrupted.checkpoints / one.name
    if one is None and other is None:
        return SaveResult(
            unproven="neither run saved anything that can be compared: report saves with session.saved, or write them "
            "into the folder HPCTRAIN_CHECKPOINT_DIR"
        )
    if one is None or other is None:
        return SaveResult(rows=(Row("save", _name(one), _name(other), False, "one of the runs has no such save"),))
    if one.resolve() == other.resolve():
        return SaveResult(unproven=f"both runs saved to {one}: let each write into its own HPCTRAIN_CHECKPOINT_DIR")
    steps = [save.step for save in saves if save is not None]
    return result_of((one, other), steps, _compared(one, other), ignored)


def result_of(
    saves: tuple[Path, Path], steps: Sequence[int], found: Mapping[str, Any], ignored: Sequence[str]
) -> SaveResult:
    """Describe a comparison.

    Args:
        saves: of the uninterrupted and of the interrupted run.
        steps: after which they were reported; empty if they weren't.
        found: what `hpctrain.checkpoint.compare_saves` printed.
        ignored: patterns of the names of tensors that may differ.
    """
    straight, interrupted = (path.name for path in saves)
    apart = f"after steps {steps[0]} and {steps[1]}" if len(set(steps)) > 1 else ""
    rows = [Row("save", straight, interrupted, not apart, apart)]
    differing = [one for one in found["differing"] if not any(fnmatchcase(one["name"], each) for each in ignored)]
    left_out = len(found["differing"]) - len(differing)
    if any(found["tensors"]):
        rows.append(_tensors(found["tensors"], differing))
    rows += [Row(name, "", "", False, f"can't be read: {why}") for name, why in found["unreadable"].items()]
    notes = []
    if left_out:
        differ = "differs, and matches" if left_out == 1 else "differ, and match"
        notes.append(f"{counted(left_out, 'tensor')} {differ} --ignore")
    if found["identical"]:
        notes.append(f"the same byte for byte, but not readable as tensors: {listed(found['identical'])}")
    if found["left_out"]:
        notes.append(f"without tensors, so not compared: {listed(found['left_out'])}")
    if found["numbers"]:
        notes.append(f"numbers outside of tensors differ: {listed(_grouped(found['numbers']))}")
    nothing = not any(found["tensors"]) and not found["identical"] and not found["unreadable"]
    unproven = f"there are no tensors in the save {straight}" if nothing else ""
    return SaveResult(rows=tuple(rows), notes=tuple(notes), unproven=unproven)


def _grouped(names: Sequence[str]) -> list[str]:
    """Name each list once, such as the 625 numbers of a state of Python's `random`."""
    counts = Counter(re.sub(r"(\.\d+)+$", "", name) for name in names)
    return sorted(name if count == 1 else f"{name} ({count} numbers)" for name, count in counts.items())


def _tensors(counts: Sequence[int], differing: Sequence[Mapping[str, Any]]) -> Row:
    cells = [str(count) for count in counts]
    if not differing:
        return Row("tensors", cells[0], cells[1], True)
    how_many = f"{len(differing)} of them"
    incomparable = [one for one in differing if one["relative"] is None]
    if incomparable:
        shown = incomparable[0]
        return Row("tensors", cells[0], cells[1], False, f"{how_many}, such as {shown['name']}: {shown['problem']}")
    most = max(differing, key=lambda one: one["relative"])
    difference = f"{how_many}, most of all {most['name']} by {most['absolute']:.2g}"
    return Row("tensors", cells[0], cells[1], False, difference, relative=most["relative"])


def _compared(one: Path, other: Path) -> dict[str, Any]:
    done = subprocess.run(
        # -P: nothing from the working directory, such as the program's own json.py
        [sys.executable, "-P", "-c", COMPARE, str(PACKAGES), str(one), str(other)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        raise RunFailedError(f"{one} and {other} can't be compared: {last or f'exit code {done.returncode}'}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _name(path: Path | None) -> str:
    return "-" if path is None else path.name
