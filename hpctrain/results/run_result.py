"""The result of a run, read from its directory, and the keys by which runs differ."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain.config.plain_yaml import read_plain_config
from hpctrain.config.root import decides_the_weights, flat_values, stored_texts
from hpctrain.run.config_change import changed_values, trained_config
from hpctrain.run.directory import RunDirectory
from hpctrain.run.manifest import as_typed
from hpctrain.status.run_status import RunStatus, read_statuses
from hpctrain.status.state import RunState


@dataclass(frozen=True, slots=True)
class RunResult:
    """One run.

    Attributes:
        status: its status.
        config: the values with which it trained, by their full keys. Those that a resume changed are one text, such as
            ``0.001 until step 10, then 0.003``. Empty if they can't be read.
        changed_keys: the keys whose values a resume changed between two steps.
    """

    status: RunStatus
    config: Mapping[str, Any]
    changed_keys: Collection[str] = ()

    @property
    def directory(self) -> RunDirectory:
        """The run's directory."""
        return RunDirectory.at(self.status.path)

    @property
    def is_live(self) -> bool:
        """Whether it trains, or waits in the queue, so that its result may still change."""
        return self.status.state.may_change

    @property
    def counts(self) -> bool:
        """Whether the run competes with others: it has completed, or is live. Others are listed after these."""
        return self.is_live or self.status.state is RunState.COMPLETED

    @property
    def is_program(self) -> bool:
        """Whether it is the run of a program."""
        return bool(self.status.command)


def read_results(directories: Sequence[RunDirectory]) -> list[RunResult]:
    """Read the results of runs, in the order of their paths; numbers in names count as numbers."""
    ordered = sorted(directories, key=_place)
    statuses = read_statuses(ordered)
    return [_result(directory, status) for directory, status in zip(ordered, statuses, strict=True)]


def _result(directory: RunDirectory, status: RunStatus) -> RunResult:
    plain = read_plain_config(trained_config(directory))
    values = flat_values(plain)
    values |= {key: as_typed(values[key], text) for key, text in stored_texts(plain).items() if key in values}
    changed = changed_values(directory) if values else {}
    # an empty group is none
    return RunResult(status, {key: value for key, value in values.items() if value != {}} | changed, tuple(changed))


def _place(directory: RunDirectory) -> tuple[str, int, str]:
    name = directory.path.name
    return str(directory.path.parent), int(name) if name.isdecimal() else -1, name


SEED = "seed"
LENGTH = ("trainer.max_steps", "trainer.max_epochs", "trainer.max_time_min", "callbacks", "trainer.eval_ema")
"""Keys that decide how long a run trains or which weights are evaluated, and with that its result. A resume may change
them, so they aren't part of a run's identity."""
OPEN = ("task", "model", "optimizer", "callbacks", "args")
"""Groups whose keys the user chooses: there, a missing key is a difference. Elsewhere, an older version lacked it."""


@dataclass(frozen=True, slots=True)
class VariedKeys:
    """The keys by which some runs differ, as far as they decide the result or the sweep varied them.

    Attributes:
        names: keys in the order in which they were typed, then others; `seed` comes last. A group whose options the
            sweep varied, such as `optimizer`, stands for the keys that follow from the option.
        choices: those of them that are groups.
    """

    names: tuple[str, ...]
    choices: frozenset[str]

    def values(self, result: RunResult) -> dict[str, Any]:
        """A run's values by key; a key that the run lacks is left out."""
        varied: Mapping[str, Any] = result.status.varied
        sources = dict.fromkeys(self.names, result.config)
        sources |= {name: varied for name in self.names if name in self.choices or not result.config}
        return {name: source[name] for name, source in sources.items() if name in source}


def varied_keys(results: Sequence[RunResult]) -> VariedKeys:
    """Find the keys by which runs differ; values are compared, not how they were typed.

    A run whose configuration can't be read doesn't count.
    """
    readable = [result for result in results if result.config]
    varied = list(dict.fromkeys(key for result in readable for key in result.status.varied))
    choices = _choices(readable, varied)
    keys = {key for result in readable for key in result.config}
    relevant = {key for key in keys if key in varied or decides_the_weights(key) or is_below(key, LENGTH)}
    differing = {key for key in relevant if _differs(readable, key)}
    changed = {key for result in readable for key in result.changed_keys}
    independent = {key for key in differing if key in varied or key in changed or not _follows(readable, key, choices)}
    names = [key for key in varied if key in independent or key in choices]
    names += sorted(independent - set(names))
    names.sort(key=lambda name: name == SEED)
    return VariedKeys(tuple(names), frozenset(choices))


def comparable(value: object) -> str:
    """A text that is the same for equal values: 1 and 1.0 are, 1 and true are not."""
    return json.dumps(_normal(value), sort_keys=True, default=str)


def _normal(value: object) -> object:
    if isinstance(value, dict):
        return {str(key): _normal(inside) for key, inside in value.items()}
    if isinstance(value, list):
        return [_normal(inside) for inside in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _choices(results: Sequence[RunResult], varied: Iterable[str]) -> list[str]:
    """The groups, such as `optimizer` and `experiment`, of which every run has an option, and not all the same."""
    groups = []
    for key in varied:
        chosen = {result.status.varied.get(key) for result in results}
        if len(chosen) > 1 and None not in chosen and not any(key in result.config for result in results):
            groups.append(key)
    return groups


def _differs(results: Sequence[RunResult], key: str) -> bool:
    group = key.partition(".")[0]
    present = [result for result in results if key in result.config]
    if len({comparable(result.config[key]) for result in present}) > 1:
        return True
    if group not in OPEN or len(present) == len(results):
        return False
    # a key that only another class has isn't a difference of its own: the class is
    target = f"{group}._target_"
    classes = {comparable(result.config.get(target)) for result in present}
    return any(key not in result.config and comparable(result.config.get(target)) in classes for result in results)


def _follows(results: Sequence[RunResult], key: str, choices: Sequence[str]) -> bool:
    """Whether a key's value follows from the options of the groups that may set it."""
    # options of a group that isn't in the configuration, such as experiment, may set any key
    setting = [choice for choice in choices if is_below(key, [choice]) or not _is_group(results, choice)]
    if not setting:
        return False
    texts_by_options: dict[tuple[str, ...], set[str]] = {}
    for result in results:
        options = tuple(result.status.varied[choice] for choice in setting)
        text = comparable(result.config[key]) if key in result.config else ""
        texts_by_options.setdefault(options, set()).add(text)
    return all(len(values) == 1 for values in texts_by_options.values())


def _is_group(results: Sequence[RunResult], name: str) -> bool:
    return any(key.startswith(f"{name}.") for result in results for key in result.config)


def is_below(key: str, groups: Iterable[str]) -> bool:
    """Whether a key is one of these, or is in one of these groups."""
    return any(key == group or key.startswith(f"{group}.") for group in groups)
