"""What a launch prints of a run that has already completed: that nothing is left to do, and what to type for more."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpctrain.attempt.outcome import train_on_command
from hpctrain.config.identity import flat_values
from hpctrain.config.program import ProgramConfig, placeholders, split_command
from hpctrain.config.root import Config
from hpctrain.config.run_config import RunConfig
from hpctrain.files import read_json_or_empty
from hpctrain.launch.existing_run import changed_keys, stored_values
from hpctrain.run.config_change import trained_config
from hpctrain.run.directory import RunDirectory
from hpctrain.run.manifest import read_varied
from hpctrain.status.run_status import RunStatus

TYPED = ["python", "-m", "hpctrain", "run"]
"""The first words of a command that launches a program."""


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
    if status.note:
        print(f"{directory.path}: already completed{status.at_step} ({status.note}){idle}")
        if not is_program:
            print(f"  {train_on_command(directory, status.note)}    # to train on")
            return
    else:
        print(f"{directory.path}: already completed{status.at_step}{idle}")
    if isinstance(config, ProgramConfig):
        unused, _ = placeholders(config)
        used = [key for key in _args(config) if key not in unused]
        if used:
            resume = f"python -m hpctrain resume {directory.as_typed} {used[0]}=VALUE"
            print(f"  {resume} resume.allow_config_change=true    # to continue it with another value")
        print(f"  {again_command(directory, config)}    # to run it again, in a run directory of its own")
        return
    assert isinstance(config, Config)
    length = "max_epochs" if config.trainer.max_steps is None else "max_steps"
    print(f"  python -m hpctrain resume {directory.as_typed} trainer.{length}=N    # to train longer")


def again_command(directory: RunDirectory, config: ProgramConfig) -> str:
    """The command that launches the same program as a new run: as it was typed, without the folder of that run."""
    manifest = read_json_or_empty(directory.manifest)
    words, command = split_command(_words(manifest.get("command")))
    if words[: len(TYPED)] != TYPED or not command:
        values = [f"{key}={config.run.args_as_typed.get(key, value)}" for key, value in _args(config).items()]
        return shlex.join([*TYPED, *values, "--", *config.run.command])
    varied = read_varied(directory)
    kept = [word for word in words[len(TYPED) :] if not _is_replaced(word, varied)]
    values = [f"{key}={value}" for key, value in varied.items()]
    folder = str(manifest.get("folder", Path.cwd()))
    there = "" if Path(folder) == Path.cwd() else f"cd {shlex.quote(folder)} && "
    return there + shlex.join([*TYPED, *kept, *values, "--", *command])


def _args(config: ProgramConfig) -> dict[str, Any]:
    return flat_values({"args": config.args}) if config.args else {}


def _words(typed: object) -> list[str]:
    try:
        return shlex.split(typed) if isinstance(typed, str) else []
    except ValueError:
        return []


def _is_replaced(word: str, varied: Mapping[str, str]) -> bool:
    key = word.lstrip("+").partition("=")[0]
    return word == "--multirun" or key in ("run_dir", *varied) or (word == "-m" and bool(varied))
