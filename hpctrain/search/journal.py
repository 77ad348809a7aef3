"""The journal of a search: which run was given to which task, and what came of it.

Why it is like this: docs/adr/0021-searches-without-a-server.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from hpctrain.errors import RunDirectoryError
from hpctrain.files import IrregularFileError, on_each_file, read_json, write_new
from hpctrain.run.directory import RunDirectory
from hpctrain.run.evaluation import MODES
from hpctrain.run.record_fields import COUNT, NUMBER, TEXT, TIME, FieldType, field_types, up_to

FOLDER = "search"
"""Name of the journal's folder in the folder of the sweep."""
DIGITS = 6
MAX_GAP = 1000
"""Numbers in a row that may be missing: a file with a higher number isn't the journal's."""
MAX_RUNG = 64
"""The steps of a rung grow by a factor: those of a higher one are more than a whole number in JSON holds."""
_FILE = re.compile(rf"[0-9]{{{DIGITS},9}}\.json")


class JournalEvent(StrEnum):
    """The event that a decision records about a run."""

    BEGIN = "begin"
    """It was given to a task."""
    END = "end"
    """It has passed a rung, or has ended."""
    RELEASE = "release"
    """Its task is gone: the next task that asks may continue it."""


_EVENTS = tuple(JournalEvent)
_EVENT = FieldType(f"one of {', '.join(_EVENTS)}", lambda value: value in _EVENTS)
_MODE = FieldType(f"one of {', '.join(MODES)}", lambda value: value in MODES)
_OBJECT = FieldType("an object", lambda value: isinstance(value, dict))


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchDecision:
    """One decision; fields that don't belong to its event have their defaults.

    Attributes:
        event: what it says.
        run: number of the run, which is the name of its folder in the sweep.
        rung: the rung that the run is to pass, or has passed; 0 for the first one, and in a search without rungs.
        time: when it was made, in epoch seconds.
        task: id of the array task, such as `12_3`, or host and process id on this machine.
        claims_before: claims of the run before it was given to the task: only later ones tell how this began and ended.
        step: the run's last completed step at its end.
        value: the metric's value; None if the run has none, or a NaN.
        metric: the metric's name, as the evaluation returns it.
        mode: `min` or `max`: which values are better.
        reason: why the run's last attempt ended.
        drawn: what the sampler drew, for the samplers that depend on results.
    """

    event: Annotated[JournalEvent, _EVENT]
    run: Annotated[int, up_to(10**9)]
    rung: Annotated[int, up_to(MAX_RUNG)] = 0
    time: Annotated[float, TIME] = field(default_factory=time.time)
    task: Annotated[str, TEXT] = ""
    claims_before: Annotated[int, COUNT] = 0
    step: Annotated[int, COUNT] = 0
    value: Annotated[float | None, NUMBER] = None
    metric: Annotated[str, TEXT] = ""
    mode: Annotated[str, _MODE] = ""
    reason: Annotated[str, TEXT] = ""
    drawn: Annotated[Mapping[str, Any], _OBJECT] = field(default_factory=dict)

    def as_record(self) -> dict[str, Any]:
        """The decision as JSON has it, without its empty fields."""
        return {name: value for name, value in asdict(self).items() if value not in ("", None, {})}


class Journal:
    """The decisions of a search, one per file, numbered without gaps.

    A decision is published as a complete file with the next number, which fails if another process has taken the
    number. So processes need no lock, and one that is killed leaves nothing behind that
    another has to wait for.

    Args:
        home: the folder of the sweep.

    Attributes:
        decisions: those that were read so far; None in the place of one whose file is damaged.
        state: what they add up to.
    """

    def __init__(self, home: RunDirectory) -> None:
        self.folder = home.path / FOLDER
        self._home = home
        self.decisions: list[SearchDecision | None] = []
        self.state = SearchState(home)

    def read(self) -> bool:
        """Read the decisions that were published since the last call.

        Returns:
            Whether there were any.

        Raises:
            OSError: the file system's error.
        """
        num_read = len(self.decisions)
        # the listing is for speed alone: an NFS client may see an old one
        with contextlib.suppress(FileNotFoundError):
            last = _last_number((entry.name for entry in os.scandir(self.folder)), num_read)
            paths = [self._path(number) for number in range(num_read + 1, last + 1)]
            for decision in on_each_file(_read, paths):
                self._add(decision)
        # whatever has the next name, a link to nothing too, keeps `publish` from it
        while os.path.lexists(path := self._path(len(self.decisions) + 1)):
            self._add(_read(path))
        return len(self.decisions) > num_read

    def publish(self, decision: SearchDecision) -> bool:
        """Publish a decision that depends on all that were read.

        Returns:
            Whether it was published: not if another process has published one since. Read that, and decide again.

        Raises:
            OSError: the file system's error.
        """
        data = json.dumps(decision.as_record(), allow_nan=False) + "\n"
        with self._home.permissions():
            if not write_new(self._path(len(self.decisions) + 1), data):
                return False
        self._add(decision)
        return True

    def _add(self, decision: SearchDecision | None) -> None:
        self.decisions.append(decision)
        if decision is not None:
            self.state.add(decision)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:0{DIGITS}d}.json"


@dataclass(slots=True)
class SearchState:
    """The state of a search, which follows from its decisions in order.

    Attributes:
        home: the folder of the sweep.
        active: by number, the runs that a task trains, or will continue after a requeue.
        released: by number, the rungs that runs without a task are to pass.
        ends: by run and rung.
        begun: every run and rung that was given to a task.
        first: by number, the decision with which a run was begun.
    """

    home: RunDirectory
    active: dict[int, SearchDecision] = field(default_factory=dict)
    released: dict[int, int] = field(default_factory=dict)
    ends: dict[tuple[int, int], SearchDecision] = field(default_factory=dict)
    begun: set[tuple[int, int]] = field(default_factory=set)
    first: dict[int, SearchDecision] = field(default_factory=dict)

    def add(self, decision: SearchDecision) -> None:
        """Add the next decision."""
        run, key = decision.run, (decision.run, decision.rung)
        if decision.event is JournalEvent.BEGIN:
            self.first.setdefault(run, decision)
            self.begun.add(key)
            self.released.pop(run, None)
            self.active[run] = decision
        elif decision.event is JournalEvent.END:
            self.active.pop(run, None)
            self.ends.setdefault(key, decision)
        else:
            self.active.pop(run, None)
            self.ends.pop(key, None)
            self.released[run] = decision.rung


def read_journal(home: RunDirectory) -> list[SearchDecision]:
    """Read all decisions of a search, oldest first; empty for a sweep without one. Damaged ones are left out."""
    journal = Journal(home)
    with contextlib.suppress(OSError):
        journal.read()
    return [decision for decision in journal.decisions if decision is not None]


def _last_number(names: Iterable[str], num_read: int) -> int:
    """The number of the last decision among files, at least the number of decisions that were read."""
    last = num_read
    for number in sorted(int(name[:-5]) for name in names if _FILE.fullmatch(name)):
        if number > last + MAX_GAP:
            break
        last = max(last, number)
    return last


def _read(path: Path) -> SearchDecision | None:
    try:
        record = read_json(path)
    except (FileNotFoundError, IrregularFileError, RunDirectoryError):
        # removed by hand, or on a damaged disk: a begin is decided again, and an end is found in the run's ledger
        return None
    # any other field that can't be is left out: the decision holds without it
    types = field_types(SearchDecision)
    fields = {name: record[name] for name, kind in types.items() if kind.accepts(record.get(name))}
    if not fields.keys() >= {"event", "run", "rung", "time"}:
        return None
    return SearchDecision(**(fields | {"event": JournalEvent(fields["event"])}))
