"""Checks of a program that is launched as the ranks of a run."""

from __future__ import annotations

import difflib
import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpctrain.config.cluster import Slurm
from hpctrain.config.node_counts import check_node_counts
from hpctrain.config.program import PLACEHOLDER, USAGE, ProgramConfig, command_of, placeholders, values_of_args
from hpctrain.config.resources import resources_of
from hpctrain.config.run_checks import check_run
from hpctrain.config.scripts import INTERPRETERS, interpreter_of, near_script
from hpctrain.errors import ConfigError
from hpctrain.phrases import either

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\.[\w.-]+)?=.*", re.DOTALL)
"""A key with its value, or a variable of a shell."""
CODE = re.compile(r"[\s'\"]")
"""Characters of a word that is code, such as an f-string of Python, in which `{args.NAME}` may be a name of its own."""


def check_program(config: ProgramConfig, environ: Mapping[str, str] = os.environ) -> None:
    """Check a program's run before anything is written.

    Args:
        config: each value is already checked by itself.
        environ: this machine's environment, for the GPUs and the search path of a local run.

    Raises:
        ConfigError: the first value or combination that can't work.
    """
    if not config.run.command:
        raise ConfigError("run.command", "[]", "there is no program to run", USAGE)
    check_run(config)
    if config.resume.from_scratch:
        problem = "has no effect on a program, which finds its own saves"
        raise ConfigError("resume.from_scratch", "true", problem, "leave it out")
    _check_args("args", config.args)
    _refuse_unset(config)
    check_node_counts(config, resources_of(config, environ))
    _refuse_assignment(config.run.command)
    if not isinstance(config.cluster, Slurm):
        _check_executable(command_of(config)[0])


def _check_args(key: str, values: Mapping[str, object]) -> None:
    for name, value in values.items():
        inside = f"{key}.{name}"
        if isinstance(value, Mapping):
            _check_args(inside, value)
        elif isinstance(value, list) and any(isinstance(one, Mapping | list) for one in value):
            raise ConfigError(inside, value, "contains another list or mapping", "write a list of single values")


def _refuse_unset(config: ProgramConfig) -> None:
    """Refuse `{args.NAME}` without a value: the program would get these characters, perhaps after hours in a queue."""
    values = values_of_args(config)
    for word in config.run.command:
        for found in () if CODE.search(word) else PLACEHOLDER.finditer(word):
            if (key := found[1]) not in values:
                near = difflib.get_close_matches(key, values, n=1)
                remedy = f"did you mean {{{near[0]}}}?" if near else f"add {key}=VALUE before --"
                raise ConfigError("run.command", word, f"{key} is not set", remedy)


def _refuse_assignment(command: Sequence[str]) -> None:
    """Refuse a key of hpctrain, or a variable of a shell, in the place of the program."""
    found = ASSIGNMENT.fullmatch(command[0])
    if found is None or shutil.which(command[0]) is not None:
        return
    if found[1] in ProgramConfig.__dataclass_fields__:
        problem, key = "keys of hpctrain stand before --", command[0]
    else:
        problem, key = "there is no shell that sets a variable", f"cluster.env.{command[0]}"
    rest = shlex.join(command[1:]) or "COMMAND"
    remedy = f"write python -m hpctrain run {shlex.quote(key)} -- {rest}"
    raise ConfigError("run.command", command[0], problem, remedy)


def _check_executable(word: str) -> None:
    if shutil.which(word) is not None:
        return
    path, is_script = Path(word), Path(word).suffix in INTERPRETERS
    interpreter = interpreter_of(word)
    if path.is_file() and path.name == word:  # a program without a slash is looked for in PATH alone
        own = f"./{word}"
        remedy = f"write {interpreter} {word}" + (f", or {own}" if shutil.which(own) else "")
        raise ConfigError("run.command", word, "is a file of this folder, which isn't in PATH", remedy)
    if path.is_file():
        remedy = f"chmod +x {word}, or name its interpreter: -- {interpreter} {word}"
        raise ConfigError("run.command", word, "isn't executable here", remedy)
    if is_script:
        near = near_script(word)
        remedy = f"did you mean {interpreter} {near}?" if near else f"correct it, and write {interpreter} before it"
        raise ConfigError("run.command", word, "is neither in PATH nor a file of this folder", remedy)
    raise ConfigError("run.command", word, "no such program is in PATH here", "correct it, or write its whole path")


def program_warnings(config: ProgramConfig) -> list[str]:
    """Return a line on each setting that works, but is probably a mistake."""
    unused, unset = placeholders(config)
    found = [f"{key} is not in the command: write {{{key}}} where its value belongs" for key in unused]
    found += [f"{{{key}}} stays as it is, because {key} is not set: add {key}=VALUE" for key in unset]
    if isinstance(config.cluster, Slurm):
        word = command_of(config)[0]
        if shutil.which(word) is None and config.cluster.container.image is None:
            remedy = either(["correct it", "load its module in cluster.setup"])
            found.append(f"{word} is not in PATH on this machine: it must be on the nodes; {remedy}")
        if config.cluster.gpus_per_node is None and "gpu" in (config.cluster.partition or "").lower():
            asked = f"cluster.partition={config.cluster.partition} looks like a GPU partition"
            found.append(f"{asked}, but the run requests no GPU; set cluster.gpus_per_node=N, or 0 if this is intended")
    return found
