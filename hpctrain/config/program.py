"""The configuration of a program that is launched as the ranks of a run: ``conf/program.yaml``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.config.identity import flat_values
from hpctrain.config.run import ProgramRun
from hpctrain.config.run_config import RunConfig
from hpctrain.config.scripts import INTERPRETERS

USAGE = "write python -m hpctrain run [KEY=VALUE ...] -- COMMAND"
PLACEHOLDER = re.compile(r"\{(args(?:\.[A-Za-z0-9_-]+)+)\}")
"""A value of `args` in the command, such as {args.lr}."""


@dataclass(kw_only=True, slots=True)
class ProgramConfig(RunConfig):
    """Keys of `python -m hpctrain run`; those of a training, such as `trainer`, don't exist here."""

    args: dict[str, Any] = field(default_factory=dict)
    """Values of your own for the command: {args.NAME} stands for the value of args.NAME."""
    run: ProgramRun = field(default_factory=ProgramRun)
    """How the program is started and stopped."""


def split_command(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the arguments at the first `--`: what precedes it, and the command; the second is empty without one."""
    if "--" not in arguments:
        return list(arguments), []
    position = list(arguments).index("--")
    return list(arguments[:position]), list(arguments[position + 1 :])


def command_of(config: ProgramConfig) -> list[str]:
    """Return the program and its arguments, with the values of `args`; other braces stay as they are."""
    values = values_of_args(config)
    return [PLACEHOLDER.sub(lambda found: values.get(found[1], found[0]), word) for word in config.run.command]


def placeholders(config: ProgramConfig) -> tuple[list[str], list[str]]:
    """Return the keys of `args` that the command doesn't use, and those that it uses and that aren't set."""
    used = dict.fromkeys(found[1] for word in config.run.command for found in PLACEHOLDER.finditer(word))
    values = values_of_args(config)
    return [key for key in values if key not in used], [key for key in used if key not in values]


def values_of_args(config: ProgramConfig) -> dict[str, str]:
    """Return the values of `args` as text for the command, by their full keys, such as `args.lr`."""
    return default_texts(config.args) | config.run.args_as_typed


def default_texts(args: Mapping[str, Any]) -> dict[str, str]:
    """Return the default texts of the values of `args`, by their full keys."""
    return {key: default_text(value) for key, value in flat_values({"args": args}).items()} if args else {}


def default_text(value: object) -> str:
    """Return the text that a program gets for a value if no typed text is stored."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, list):
        return ",".join(map(default_text, value))
    return str(value)


def default_name(command: Sequence[str]) -> str:
    """Return the name of a run without one: its script's, such as `train` for `torchrun train.py`, or its program's."""
    scripts = [word for word in command[1:] if Path(word).suffix in INTERPRETERS]
    named = next(iter(scripts), None) or _module(command) or command[0]
    stem = re.sub(r"[^A-Za-z0-9_.+-]", "_", Path(named).stem).lstrip(".+-")
    return stem[:200] or "program"


def _module(command: Sequence[str]) -> str | None:
    """Return the module of `python -m MODULE`."""
    if "-m" not in command[1:-1] or not Path(command[0]).name.startswith("python"):
        return None
    return command[command.index("-m") + 1].replace(".", "_")
