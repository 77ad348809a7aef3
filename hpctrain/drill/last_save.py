"""Compare what two runs of a program saved last, in a process that may import torch."""

from __future__ import annotations

import json
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
from hpctrain.drill.comparison import Row
from hpctrain.drill.launched_run import last_change
from hpctrain.errors import RunFailedError
from hpctrain.phrases import counted, listed
from hpctrain.run.directory import RunDirectory
from hpctrain.run.saves import Save, last_save

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
class LastSaves:
    """The last saves of both runs.

    Attributes:
        straight: of the uninterrupted run; None without one.
        interrupted: of the interrupted run.
        steps: after which they were reported; None if they weren't.
    """

    straight: Path | None
    interrupted: Path | None
    steps: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveResult:
    """The comparison of two saves: rows of the table, remarks, and why it proves nothing (empty if it does)."""

    rows: tuple[Row, ...] = ()
    notes: tuple[str, ...] = ()
    unproven: str = ""


def find_last_saves(straight: RunDirectory, interrupted: RunDirectory) -> LastSaves:
    """Find the last reported saves; without reports, what the straight run wrote last into its checkpoints folder."""
    one, other = last_save(straight), last_save(interrupted)
    if one is not None and other is not None:
        return LastSaves(straight=one.path, interrupted=other.path, steps=(one.step, other.step))
    if one is not None or other is not None:
        return LastSaves(straight=_path(one), interrupted=_path(other))
    newest = newest_entry(straight.checkpoints)
    same = None if newest is None else interrupted.checkpoints / newest.name
    return LastSaves(straight=newest, interrupted=same if same is not None and same.exists() else None)


def newest_entry(folder: Path) -> Path | None:
    """The file or folder in a folder whose contents changed last, without texts and links; None without one."""
    found = [path for path in folder.glob("[!.]*") if path.suffix not in NOT_SAVES and not path.is_symlink()]
    return max(found, key=lambda path: (last_change(path), path.name), default=None)


def compare_last_saves(saves: LastSaves, ignored: Sequence[str]) -> SaveResult:
    """Compare the tensors of the last saves.

    Args:
        saves: of both runs.
        ignored: patterns of the names of tensors that may differ.

    Raises:
        RunFailedError: the comparison could not be made.
    """
    one, other = saves.straight, saves.interrupted
    if one is None and other is None:
        return SaveResult(
            unproven="neither run saved anything that can be compared: report saves with session.saved, or write them "
            "into the folder HPCTRAIN_CHECKPOINT_DIR"
        )
    if one is None or other is None:
        return SaveResult(rows=(Row("save", _name(one), _name(other), False, "one of the runs has no such save"),))
    if one.resolve() == other.resolve():
        return SaveResult(unproven=f"both runs saved to {one}: let each write into its own HPCTRAIN_CHECKPOINT_DIR")
    return result_of(saves, _compared(one, other), ignored)


def result_of(saves: LastSaves, found: Mapping[str, Any], ignored: Sequence[str]) -> SaveResult:
    """Describe a comparison.

    Args:
        saves: that were compared.
        found: what `hpctrain.checkpoint.compare_saves` printed.
        ignored: patterns of the names of tensors that may differ.
    """
    steps = saves.steps or (0, 0)
    apart = "" if steps[0] == steps[1] else f"after steps {steps[0]} and {steps[1]}"
    rows = [Row("save", _name(saves.straight), _name(saves.interrupted), not apart, apart)]
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
    unproven = f"there are no tensors in the save {_name(saves.straight)}" if nothing else ""
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


def _path(save: Save | None) -> Path | None:
    return None if save is None else save.path
