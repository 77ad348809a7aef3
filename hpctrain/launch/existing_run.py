"""A run that exists, before it is launched again: its configuration with changes, and what is left to train."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.attempt.outcome import TIME_BOUND, train_further_command
from hpctrain.config.checks import check
from hpctrain.config.plain_yaml import read_plain_config
from hpctrain.config.program import default_texts, values_of_args
from hpctrain.config.root import (
    OPEN_GROUPS,
    OPEN_PROGRAM_GROUPS,
    Config,
    ProgramConfig,
    RunConfig,
    decides_the_weights,
    flat,
    flat_values,
)
from hpctrain.config.stored import load_run
from hpctrain.errors import ConfigError
from hpctrain.launch.launch_code import importing_code_of
from hpctrain.run.config_change import revert_config, trained_config
from hpctrain.run.directory import RunDirectory
from hpctrain.run.gone_checkpoints import describe_gone
from hpctrain.run.reason import Reason
from hpctrain.status.before_launch import statuses_before_launch
from hpctrain.status.run_status import RunStatus
from hpctrain.status.state import RunState
from hpctrain.streams import Printer

GLOBAL_BATCH_SIZE = "trainer.global_batch_size"


def revert_failed_changes(directories: Sequence[RunDirectory], report: Printer = print) -> None:
    """Revert each run's last resume if its job failed before an attempt began: no other process has noticed that end.

    Without SLURM's answer, nothing is reverted.

    Args:
        directories: of the runs.
        report: gets a line on each reverted change.
    """
    changed = [directory for directory in directories if directory.config_before.exists()]
    for directory, status in zip(changed, statuses_before_launch(changed, force=True), strict=True):
        # after a cancellation, the advice is a plain `resume`, which is to continue with the change
        if status.unstarted and status.state is RunState.FAILED and revert_config(directory):
            where = os.path.relpath(directory.path)
            report(f"{where}: the last resume's job failed before it started an attempt; its changes are undone")


def nothing_left(status: RunStatus, config: RunConfig) -> bool:
    """Return whether a run has completed, and this configuration can't make it longer.

    A program may continue with any changed value. A training may if its number of steps can depend on the changed keys;
    its ranks then find out whether it does. The result is also False if the run's checkpoints are gone and the
    configuration allows starting over.
    """
    # not by the state, which is that of a newer job if there is one
    completed = bool(status.attempts) and status.attempts[-1].reason is Reason.COMPLETED
    if not completed or status.state.may_change:
        return False
    if config.resume.from_scratch and describe_gone(RunDirectory(status.path)):
        return False
    changed = changed_keys(stored_values(trained_config(RunDirectory(status.path))), config)
    length = ["trainer.max_steps", "trainer.max_epochs"]
    if status.attempts[-1].detail:  # it ended before its last step
        length += [TIME_BOUND, *(key for key in changed if key.split(".")[0] == "callbacks")]
    if isinstance(config, Config) and config.resume.allow_config_change:
        length += [key for key in changed if key.partition(".")[0] in ("task", "data") or key == GLOBAL_BATCH_SIZE]
    else:
        length += [key for key in changed if decides_the_weights(key)]  # refused later, for a training
    return not any(key in length for key in changed)


def stored_values(path: Path) -> dict[str, Any]:
    """Read the values of a ``config.yaml`` by their full keys; empty if it can't be read."""
    plain = read_plain_config(path)
    return _defaults("run" in plain) | flat_values(plain) if plain else {}


@functools.cache
def _defaults(is_program: bool) -> dict[str, Any]:
    """The values of keys that an earlier version didn't store; the open groups have none."""
    default = ProgramConfig() if is_program else Config()
    return {key: value for key, value in flat(default).items() if key not in (*OPEN_GROUPS, *OPEN_PROGRAM_GROUPS)}


def changed_keys(old: Mapping[str, Any], new: RunConfig) -> list[str]:
    """Return the keys whose values differ, sorted; keys under `resume` are left out.

    Args:
        old: the stored values by their full keys.
        new: the configuration with which the run is to continue.
    """
    after = flat(new)
    # an empty group is none
    changed = (key for key in old.keys() | after.keys() if _or_none(old.get(key)) != _or_none(after.get(key)))
    return sorted(key for key in changed if not key.startswith("resume."))


def _or_none(value: object) -> object:
    return None if value == {} else value


def refuse_other_run(old: RunConfig, new: RunConfig, report: Printer = print) -> None:
    """Refuse a configuration that would change a run's weights.

    Args:
        old: the stored one.
        new: with which the run is to continue.
        report: gets a line on each other change.

    Raises:
        ConfigError: names the changed keys on which the weights depend.
    """
    before, after = flat(old), flat(new)
    changed = changed_keys(before, new)
    refused = [key for key in changed if decides_the_weights(key) and not new.resume.allow_config_change]
    if refused:
        key, further_keys = refused[0], refused[1:]
        depend = "the program's results depend" if isinstance(new, ProgramConfig) else "the weights depend"
        raise ConfigError(
            key,
            after.get(key),
            f"the run in {new.run_dir} has {before.get(key)}, and {depend} on it"
            + (f"; they also depend on {', '.join(further_keys)}" if further_keys else ""),
            "choose another run_dir, or set resume.allow_config_change=true",
        )
    for key in changed:
        inexact = "; the run is no longer exact" if decides_the_weights(key) else ""
        report(f"the run continues with {key}={after.get(key)} instead of {before.get(key)}{inexact}")


def with_stored_texts(old: RunConfig, new: RunConfig, report: Printer = print) -> RunConfig:
    """Return a program's configuration with the stored texts of those values of `args` that didn't change.

    Args:
        old: the stored one.
        new: with which the run is to continue; with `resume.allow_config_change`, it keeps its own texts.
        report: gets a line on each text of `new` that isn't used.
    """
    if not isinstance(old, ProgramConfig) or not isinstance(new, ProgramConfig) or new.resume.allow_config_change:
        return new
    before, after = values_of_args(old), values_of_args(new)
    plain, texts = default_texts(new.args), {}
    equal = [key for key, text in default_texts(old.args).items() if plain.get(key) == text]
    for key in after:
        text = before[key] if key in equal else after[key]
        if text != after[key]:
            report(f"{key} stays {text}, with which the run began: {after[key]} is the same value")
        if text != plain[key]:
            texts[key] = text
    return dataclasses.replace(new, run=dataclasses.replace(new.run, args_as_typed=texts))


def changed_config(
    directory: RunDirectory, overrides: Sequence[str], config_dir: str | None, *, code_now: bool = False
) -> RunConfig:
    """A run's configuration with overrides on top, which may choose another option of a group.

    Args:
        directory: of the run.
        overrides: as typed.
        config_dir: a folder with more options.
        code_now: check the classes in today's code, and not in the recorded one.

    Raises:
        ConfigError: an override is invalid.
    """
    keys = {override: override.lstrip("+~").partition("=")[0] for override in overrides}
    stored = load_run(directory.config)
    command = stored.run.command if isinstance(stored, ProgramConfig) else None
    groups = {key for key in keys.values() if "." not in key}
    default = type(stored)()
    names = [field.name for field in dataclasses.fields(default)]
    schema_groups = {name for name in names if dataclasses.is_dataclass(getattr(default, name))}
    chosen = groups & {*schema_groups, *OPEN_GROUPS}
    if {key.split(".")[0] for key in keys.values()} - {*names}:
        # Hydra takes a tenth of a second to import, and an existing run seldom needs it
        from hpctrain.config.compose import composer_of

        composer_of(command, config_dir).refuse_foreign(overrides)
    values = [override for override in overrides if keys[override].split(".")[0] not in chosen]
    config = dataclasses.replace(load_run(directory.config, values), run_dir=str(directory.path))
    if chosen:
        group_overrides = [override for override in overrides if override not in values]
        # composition checks these together with the chosen groups
        if "cluster" in chosen:
            group_overrides.append(f"nodes={config.nodes}")
        if isinstance(stored, Config) and "trainer" not in chosen:
            group_overrides.append(f"{GLOBAL_BATCH_SIZE}={stored.trainer.global_batch_size}")
        from hpctrain.config.compose import composer_of

        composed = composer_of(command, config_dir).compose_run(group_overrides)
        config = dataclasses.replace(config, **{group: getattr(composed, group) for group in chosen})
    with importing_code_of(directory.path, now=code_now):
        check(config)
    return config


def print_completed(status: RunStatus, config: RunConfig, *, code_now: bool = False) -> None:
    """Print that nothing is left to do, and what to type for more.

    Args:
        status: of the run.
        config: with which it was launched again.
        code_now: whether it was to get today's code.
    """
    directory = RunDirectory(status.path)
    is_program = isinstance(config, ProgramConfig)
    verb = "run" if is_program else "train"
    is_changed = bool(changed_keys(stored_values(trained_config(directory)), config))
    idle = f"; nothing is left to {verb}, and nothing was changed" if is_program or code_now or is_changed else ""
    note = f" ({status.note})" if status.note else ""
    print(f"{directory.path}: already completed{status.at_step}{note}{idle}")
    if is_program:
        print("  to run it again, type its command without run_dir, or with another one")
    elif status.note:
        print(f"  {train_further_command(directory, status.note)}    # to train further")
    else:
        assert isinstance(config, Config)
        length = "max_epochs" if config.trainer.max_steps is None else "max_steps"
        print(f"  python -m hpctrain resume {directory.as_typed} trainer.{length}=N    # to train longer")
