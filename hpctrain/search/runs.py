"""The runs of a sweep, and their numbers, which are the names of their folders."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from hpctrain.config.compose import Composer
from hpctrain.config.root import ProgramConfig, RunConfig, decides_the_weights, flat
from hpctrain.config.stored import load_run
from hpctrain.errors import ConfigError
from hpctrain.launch.existing_run import stored_values
from hpctrain.results.run_result import comparable, is_below
from hpctrain.run.config_change import changed_values
from hpctrain.run.directory import RunDirectory
from hpctrain.run.launch_mark import LaunchMark
from hpctrain.run.manifest import read_varied, value_text, varied_text

SILENT_S = 2.0
"""Seconds before the first line on how far many runs are prepared, and between lines."""
YAML = {"True": "true", "False": "false", "None": "null"}

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class SweepRun:
    """One run of a sweep.

    Attributes:
        config: checked; with a `run_dir` once the run has a place in the sweep.
        varied: the keys that the sweep varies, with this run's values as typed.
    """

    config: RunConfig
    varied: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def compose(cls, composer: Composer, overrides: Sequence[str], fixed: Collection[str]) -> SweepRun:
        """Compose one run of a sweep.

        Args:
            composer: of the command line's folders.
            overrides: of the run.
            fixed: keys that don't vary.
        """
        run_overrides = without_hydra_overrides(overrides)
        pairs = [override.partition("=")[::2] for override in run_overrides]
        # Hydra writes a sweep's values as Python does, except those of a program
        texts = {key.lstrip("+"): value for key, value in pairs if key not in fixed}
        varied = {key: value if key.startswith("args.") else YAML.get(value, value) for key, value in texts.items()}
        return cls(composer.compose_run(run_overrides), varied)

    def at(self, path: Path | str) -> SweepRun:
        """Return the run with this run directory."""
        return dataclasses.replace(self, config=dataclasses.replace(self.config, run_dir=str(path)))

    @property
    def directory(self) -> RunDirectory:
        """The run's directory."""
        return RunDirectory.at(str(self.config.run_dir))

    @property
    def heading(self) -> str:
        """The keys that the sweep varies with the run's values, or the directory if they aren't known."""
        return varied_text(self.varied) or os.path.relpath(self.directory.path)


def without_hydra_overrides(overrides: Sequence[str]) -> list[str]:
    """Leave out the overrides that configure Hydra."""
    return [override for override in overrides if not override.lstrip("+~").startswith("hydra")]


def with_progress(items: Sequence[Item], done: str, clock: Callable[[], float] = time.monotonic) -> Iterator[Item]:
    """Yield the items, and print on standard error how many are done every `SILENT_S` seconds.

    Args:
        items: such as the runs of a sweep.
        done: the verb for finished items, such as `composed`.
        clock: seconds.
    """
    printed_at = clock()
    for number, item in enumerate(items):
        if clock() - printed_at >= SILENT_S:
            printed_at = clock()
            print(f"{number} of {len(items)} runs {done}", file=sys.stderr, flush=True)
        yield item


def runs_in(home: RunDirectory) -> dict[int, RunDirectory]:
    """The directories of a sweep's runs, by number and in this order; one that is still being made may be empty."""
    entries = home.path.iterdir() if home.path.is_dir() else ()
    numbers = sorted(int(entry.name) for entry in entries if entry.name.isdecimal())
    return {number: RunDirectory.at(home.path / str(number)) for number in numbers}


def place(runs: Sequence[SweepRun], home: RunDirectory) -> list[SweepRun]:
    """Give each run its directory: that of the same run if the sweep has it already, else the next free number.

    A run whose configuration can't be read keeps its number.

    Args:
        runs: of one command, or of one batch of a sweeper.
        home: the sweep's directory.
    """
    names = {name for run in runs for name in run.varied}
    # a launch that was killed left its last run unfinished, and its number free
    existing = {number: run for number, run in runs_in(home).items() if not LaunchMark(run).is_unfinished}
    numbers = list(existing)
    read = {number: _values(existing[number]) for number in with_progress(numbers, "read")}
    stored = {number: values for number, values in read.items() if values}
    numbers_by_identity: dict[str, list[int]] = {}
    for number, values in stored.items():
        numbers_by_identity.setdefault(_identity(values, names), []).append(number)
    free = itertools.count(max(numbers, default=-1) + 1)
    placed = []
    for run in with_progress(runs, "placed"):
        values, varied = flat(run.config), dict(run.varied)
        identity = _identity(values, names)
        matches = numbers_by_identity.get(identity, [])
        while matches and not _loads(existing[matches[0]]):
            matches.pop(0)
        if matches:
            # a value that is typed twice makes two runs; those of a program may differ in the text
            is_program = isinstance(run.config, ProgramConfig)
            texts = [read_varied(existing[number]) for number in matches] if is_program else []
            number = matches.pop(texts.index(varied) if varied in texts else 0)
        else:
            number = next(free)
            if stored:
                varied |= _differences(next(iter(stored.values())), values, names)
        placed.append(dataclasses.replace(run.at(home.path / str(number)), varied=varied))
    return placed


def _identity(values: Mapping[str, Any], names: Collection[str]) -> str:
    """Return a text that is the same for equal runs of a sweep: the keys that decide the weights, or that it varies.

    A file that was edited by hand may have 1 for 1.0.
    """
    return comparable({key: value for key, value in values.items() if decides_the_weights(key) or is_below(key, names)})


def _differences(first: Mapping[str, Any], values: Mapping[str, Any], names: Collection[str]) -> dict[str, str]:
    """Return the keys that decide the weights and differ from the sweep's first run, without ``names``."""
    keys = sorted(key for key in first.keys() | values.keys() if decides_the_weights(key) and not is_below(key, names))
    return {key: value_text(values.get(key)) for key in keys if first.get(key) != values.get(key)}


def _values(directory: RunDirectory) -> Mapping[str, Any]:
    """The stored values of a run; empty if there is no run, or it can't be read."""
    try:
        changed_ns = directory.config.stat().st_mtime_ns
    except OSError:
        return {}
    return _values_once(directory, changed_ns)


@functools.cache  # a sweeper places batch after batch
def _values_once(directory: RunDirectory, _changed_ns: int) -> Mapping[str, Any]:
    values = stored_values(directory.config)
    if not values:
        _loads(directory)  # prints why not
        return {}
    # a run that was trained with several values isn't the run of any of them
    return values | changed_values(directory)


def _loads(directory: RunDirectory) -> bool:
    try:
        load_run(directory.config)
    except ConfigError as error:
        where = os.path.relpath(directory.path)
        print(f"hpctrain: warning: {where}: {error}; the sweep doesn't use its number again", file=sys.stderr)
        return False
    return True
