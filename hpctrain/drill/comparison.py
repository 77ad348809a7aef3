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
from hpctrain.results.run_comparison import logged_metrics
from hpctrain.run.checkpoints import CheckpointInfo, newest_intact
from hpctrain.run.directory import RunDirectory
from hpctrain.run.saves import last_save, unreported_files

Metrics = Mapping[str, Mapping[int, float]]
"""Values by name and step."""
COMPARED_FIELDS = {"steps": "step", "samples seen": "samples_seen", "weights digest": "weights_digest"}
"""Fields of the newest checkpoints that are compared: a field of `CheckpointInfo` by its name in the table."""


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
class ComparisonRow:
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
    return TrainingResult(newest=newest, metrics=logged_metrics(directory), samples=_read_samples(directory))


def compare(straight: TrainingResult, interrupted: TrainingResult) -> list[ComparisonRow]:
    """Compare everything that an exact resume must not change."""
    rows = [
        compare_values(what, getattr(straight.newest, field, None), getattr(interrupted.newest, field, None))
        for what, field in COMPARED_FIELDS.items()
    ]
    rows += compare_metrics(straight.metrics, interrupted.metrics)
    if straight.samples or interrupted.samples:
        rows.append(_compare_samples(straight.samples, interrupted.samples))
    return rows


def compare_metrics(straight: Metrics, interrupted: Metrics) -> list[ComparisonRow]:
    """Compare each series of metrics, step by step."""
    names = sorted(straight.keys() | interrupted.keys())
    return [_compare_series(name, straight.get(name, {}), interrupted.get(name, {})) for name in names]


def _read_samples(directory: RunDirectory) -> dict[int, dict[int, tuple[int, ...]]]:
    samples: dict[int, dict[int, tuple[int, ...]]] = {}
    for rank in directory.ranks_with(directory.sample_log("*")):
        for record in read_json_lines(directory.sample_log(rank), at_most=LARGEST_LOG_BYTES):
            # if a step was repeated, its last record counts
            samples.setdefault(int(record["step"]), {})[rank] = tuple(record["samples"])
    return samples


def compare_values(what: str, straight: object, interrupted: object) -> ComparisonRow:
    """Compare two values; None stands for a missing one."""
    text, other_text = ("-" if value is None else str(value) for value in (straight, interrupted))
    # a value that both runs lack isn't evidence of equality
    return ComparisonRow(what, text, other_text, equal=straight == interrupted and straight is not None)


def _compare_series(what: str, straight: Mapping[int, float], interrupted: Mapping[int, float]) -> ComparisonRow:
    runs = (straight, interrupted)
    text, other_text = (f"{values[max(values)]:.6g}, {len(values)} values" if values else "-" for values in runs)
    first = _first_difference(straight, interrupted)
    if first is None:
        return ComparisonRow(what, text, other_text, equal=True)
    difference = f"first after step {first[0]}: {first[1]} and {first[2]}"
    relative = _largest_relative(straight, interrupted)
    return ComparisonRow(what, text, other_text, equal=False, difference=difference, relative=relative)


def _compare_samples(straight: Mapping[int, object], interrupted: Mapping[int, object]) -> ComparisonRow:
    text, other_text = (f"of {len(steps)} steps" for steps in (straight, interrupted))
    first = _first_difference(straight, interrupted)
    difference = "" if first is None else f"first in step {first[0]}"
    return ComparisonRow("samples by rank", text, other_text, equal=first is None, difference=difference)


def _largest_relative(straight: Mapping[int, float], interrupted: Mapping[int, float]) -> float | None:
    """The largest relative difference of two values of one step; None if a value is missing, NaN or infinite."""
    values = (*straight.values(), *interrupted.values())
    if straight.keys() != interrupted.keys() or not all(map(math.isfinite, values)):
        return None
    pairs = [(value, interrupted[step]) for step, value in straight.items() if value != interrupted[step]]
    return max((abs(a - b) / max(abs(a), abs(b)) for a, b in pairs), default=0.0)


def _first_difference(straight: Mapping[int, object], interrupted: Mapping[int, object]) -> tuple[int, str, str] | None:
    for step in sorted(straight.keys() | interrupted.keys()):
        mine, theirs = (repr(values[step]) if step in values else "nothing" for values in (straight, interrupted))
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

    rows: tuple[ComparisonRow, ...] = ()
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
    path, other_path = (None if save is None else save.path for save in saves)
    if path is None and other_path is None:
        files = [(changed_at, file) for file, changed_at in unreported_files(straight) if not file.is_symlink()]
        path = max((entry for entry in files if entry[1].suffix not in NOT_SAVES), default=(0.0, None))[1]
        if path is not None and (interrupted.checkpoints / path.name).exists():
            other_path = interrupted.checkpoints / path.name
    if path is None and other_path is None:
        return SaveResult(
            unproven="neither run saved anything that can be compared: report saves with session.saved, or write them "
            "into the folder HPCTRAIN_CHECKPOINT_DIR"
        )
    if path is None or other_path is None:
        name, other_name = ("-" if save is None else save.name for save in (path, other_path))
        return SaveResult(rows=(ComparisonRow("save", name, other_name, False, "one of the runs has no such save"),))
    if path.resolve() == other_path.resolve():
        return SaveResult(unproven=f"both runs saved to {path}: let each write into its own HPCTRAIN_CHECKPOINT_DIR")
    steps = [save.step for save in saves if save is not None]
    return result_of((path, other_path), steps, _compare_tensors(path, other_path), ignored)


def result_of(
    saves: tuple[Path, Path], steps: Sequence[int], report: Mapping[str, Any], ignored: Sequence[str]
) -> SaveResult:
    """Describe a comparison.

    Args:
        saves: of the uninterrupted and of the interrupted run.
        steps: after which they were reported; empty if they weren't.
        report: what `hpctrain.checkpoint.compare_saves` printed.
        ignored: patterns of the names of tensors that may differ.
    """
    straight, interrupted = (path.name for path in saves)
    apart = f"after steps {steps[0]} and {steps[1]}" if len(set(steps)) > 1 else ""
    rows = [ComparisonRow("save", straight, interrupted, not apart, apart)]
    differing = [tensor for tensor in report["differing"] if not _matches(tensor["name"], ignored)]
    left_out = len(report["differing"]) - len(differing)
    if any(report["tensors"]):
        rows.append(_tensors(report["tensors"], differing))
    unreadable = report["unreadable"].items()
    rows += [ComparisonRow(name, "", "", False, f"can't be read: {why}") for name, why in unreadable]
    notes = []
    if left_out:
        differ = "differs, and matches" if left_out == 1 else "differ, and match"
        notes.append(f"{counted(left_out, 'tensor')} {differ} --ignore")
    if report["identical"]:
        notes.append(f"the same byte for byte, but not readable as tensors: {listed(report['identical'])}")
    if report["left_out"]:
        notes.append(f"without tensors, so not compared: {listed(report['left_out'])}")
    if report["numbers"]:
        notes.append(f"numbers outside of tensors differ: {listed(_grouped(report['numbers']))}")
    nothing = not any(report["tensors"]) and not report["identical"] and not report["unreadable"]
    unproven = f"there are no tensors in the save {straight}" if nothing else ""
    return SaveResult(rows=tuple(rows), notes=tuple(notes), unproven=unproven)


def _grouped(names: Sequence[str]) -> list[str]:
    """Name each list once, such as the 625 numbers of a state of Python's `random`."""
    counts = Counter(re.sub(r"(\.\d+)+$", "", name) for name in names)
    return sorted(name if count == 1 else f"{name} ({count} numbers)" for name, count in counts.items())


def _tensors(counts: Sequence[int], differing: Sequence[Mapping[str, Any]]) -> ComparisonRow:
    text, other_text = map(str, counts)
    if not differing:
        return ComparisonRow("tensors", text, other_text, equal=True)
    how_many = f"{len(differing)} of them"
    for tensor in differing:
        if tensor["relative"] is None:
            example = f"{how_many}, such as {tensor['name']}: {tensor['problem']}"
            return ComparisonRow("tensors", text, other_text, equal=False, difference=example)
    largest = max(differing, key=lambda tensor: tensor["relative"])
    difference = f"{how_many}, most of all {largest['name']} by {largest['absolute']:.2g}"
    return ComparisonRow("tensors", text, other_text, equal=False, difference=difference, relative=largest["relative"])


def _compare_tensors(straight: Path, interrupted: Path) -> dict[str, Any]:
    done = subprocess.run(
        # -P: nothing from the working directory, such as the program's own json.py
        [sys.executable, "-P", "-c", COMPARE, str(PACKAGES), str(straight), str(interrupted)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        why = done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
        raise RunFailedError(f"{straight} and {interrupted} can't be compared: {why}")
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
