"""A program that is launched as the ranks of a run: its command, and the checks of its configuration.

Why it is like this: docs/adr/0019-any-program-as-a-run.md.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.config.cluster import Slurm
from hpctrain.config.command import INTERPRETERS, RankLauncher, interpreter_of, near_script
from hpctrain.config.plain_yaml import read_plain_values
from hpctrain.config.resources import Resources, check_node_counts, resources_of
from hpctrain.config.root import ProgramConfig, flat, flat_values
from hpctrain.errors import ConfigError
from hpctrain.phrases import either

USAGE = "write python -m hpctrain run [KEY=VALUE ...] -- COMMAND"
PLACEHOLDER = re.compile(r"\{(args(?:\.[A-Za-z0-9_-]+)+)\}")
"""A value of `args` in the command, such as {args.lr}."""


def split_command(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the arguments at the first `--`: what precedes it, and the command; the second is empty without one."""
    if "--" not in arguments:
        return list(arguments), []
    position = list(arguments).index("--")
    return list(arguments[:position]), list(arguments[position + 1 :])


def command_of(config: ProgramConfig) -> list[str]:
    """Return the program and its arguments, with the values of `args`; other braces stay as they are."""
    values = values_of_args(config)
    return [PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), word) for word in config.run.command]


def placeholders(config: ProgramConfig) -> tuple[list[str], list[str]]:
    """Return the keys of `args` that the command doesn't use, and those that it uses and that aren't set."""
    used_keys = dict.fromkeys(match[1] for word in config.run.command for match in PLACEHOLDER.finditer(word))
    values = values_of_args(config)
    return [key for key in values if key not in used_keys], [key for key in used_keys if key not in values]


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
    program = next(iter(scripts), None) or _module(command) or command[0]
    stem = re.sub(r"[^A-Za-z0-9_.+-]", "_", Path(program).stem).lstrip(".+-")
    return stem[:200] or "program"


def _module(command: Sequence[str]) -> str | None:
    """Return the module of `python -m MODULE`."""
    if "-m" not in command[1:-1] or not Path(command[0]).name.startswith("python"):
        return None
    return command[command.index("-m") + 1].replace(".", "_")


ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\.[\w.-]+)?=.*", re.DOTALL)
"""A key with its value, or a variable of a shell."""
_KEYS_OF_RANKS = ("nodes", "cluster.kind", "cluster.processes_per_node", "cluster.gpus_per_node")
CODE = re.compile(r"[\s'\"]")
"""Characters of a word that is code, such as an f-string of Python, in which `{args.NAME}` may be a name of its own."""


def check_program(config: ProgramConfig, environ: Mapping[str, str] = os.environ) -> None:
    """Check what only a program's run has, before anything is written.

    Args:
        config: each value is already checked by itself, and there is a command.
        environ: this machine's environment, for the GPUs and the search path of a local run.

    Raises:
        ConfigError: the first value or combination that can't work.
    """
    if config.run.cwd == "own" and config.code.snapshot == "none":
        problem = "needs a copy of the code, and code.snapshot=none makes none"
        raise ConfigError("run.cwd", "own", problem, "leave out one of the two")
    if config.resume.from_scratch:
        problem = "has no effect on a program, which finds its own saves"
        raise ConfigError("resume.from_scratch", "true", problem, "leave it out")
    _check_args("args", config.args)
    _refuse_unset(config)
    resources = resources_of(config, environ)
    check_node_counts(config, resources)
    _refuse_assignment(config.run.command)
    # It would ignore the ranks' variables: each rank would run a training of its own over the others' files, and the
    # run would end as completed.
    if (launcher := _launcher_per_rank(config, resources)) is not None and launcher.is_refused:
        raise ConfigError("run.processes", "ranks", launcher.problem, launcher.remedy)
    if not isinstance(config.cluster, Slurm):
        _check_executable(command_of(config)[0])


def _check_args(key: str, values: Mapping[str, object]) -> None:
    for name, value in values.items():
        inside = f"{key}.{name}"
        if isinstance(value, Mapping):
            _check_args(inside, value)
        elif isinstance(value, list) and any(isinstance(element, Mapping | list) for element in value):
            raise ConfigError(inside, value, "contains another list or mapping", "write a list of single values")


def _refuse_unset(config: ProgramConfig) -> None:
    """Refuse `{args.NAME}` without a value: the program would get these characters, perhaps after hours in a queue."""
    values = values_of_args(config)
    for word in config.run.command:
        for match in () if CODE.search(word) else PLACEHOLDER.finditer(word):
            if (key := match[1]) not in values:
                near = difflib.get_close_matches(key, values, n=1)
                remedy = f"did you mean {{{near[0]}}}?" if near else f"add {key}=VALUE before --"
                raise ConfigError("run.command", word, f"{key} is not set", remedy)


def _refuse_assignment(command: Sequence[str]) -> None:
    """Refuse a key of hpctrain, or a variable of a shell, in the place of the program."""
    match = ASSIGNMENT.fullmatch(command[0])
    if match is None or shutil.which(command[0]) is not None:
        return
    if match[1] in ProgramConfig.__dataclass_fields__:
        problem, key = "keys of hpctrain stand before --", command[0]
    else:
        problem, key = "there is no shell that sets a variable", f"cluster.env.{command[0]}"
    program = shlex.join(command[1:]) or "COMMAND"
    remedy = f"write python -m hpctrain run {shlex.quote(key)} -- {program}"
    raise ConfigError("run.command", command[0], problem, remedy)


@dataclass(frozen=True, slots=True)
class _LauncherPerRank:
    """A launcher, such as torchrun, that a run would start once per rank: the problem, and what to write instead."""

    problem: str
    remedy: str
    is_refused: bool


def _launcher_per_rank(config: ProgramConfig, resources: Resources) -> _LauncherPerRank | None:
    """The launcher that each rank would start; None without one, or if its copies connect to each other."""
    run, several_nodes = config.run, resources.num_nodes > 1
    if run.processes == "node" or run.independent_ranks or resources.world_size == 1:
        return None
    launcher = RankLauncher.of(command_of(config))
    if launcher is None or (resources.processes_per_node == 1 and launcher.spans_nodes):
        return None
    name = f"{launcher.name} in {launcher.script}" if launcher.script else launcher.name
    per_node = f" ({resources.processes_per_node} per node)" if several_nodes else ""
    would = "would" if launcher.is_certain else "might"
    copies = f"its {resources.world_size} copies{per_node} {would} train separately"
    instead = "write run.processes=node before --, or"
    if launcher.starts_whole_job and several_nodes:
        instead = f"leave {launcher.name} out, since hpctrain starts the ranks, or write"
    return _LauncherPerRank(
        problem=f"{name} starts the ranks itself, so {copies}, and overwrite each other's files",
        remedy=f"{instead} run.independent_ranks=true if separate trainings are intended",
        # a run that began with it, or its sweep, continues with a warning
        is_refused=launcher.is_certain and not _is_begun(config),
    )


def _is_begun(config: ProgramConfig) -> bool:
    """Whether a run began with the same ranks, or belongs to a sweep that exists."""
    folder, now = Path(config.run_dir or "runs"), flat(config)
    stored = read_plain_values(folder / "config.yaml", _KEYS_OF_RANKS)
    is_same = bool(stored) and all(stored.get(key) == now.get(key) for key in _KEYS_OF_RANKS)
    return config.run_dir is not None and (is_same or (folder / "sweep.json").is_file())


def _check_executable(word: str) -> None:
    if shutil.which(word) is not None:
        return
    path, is_script = Path(word), Path(word).suffix in INTERPRETERS
    interpreter = interpreter_of(word)
    if path.is_file() and path.name == word:  # a program without a slash is looked for in PATH alone
        local_path = f"./{word}"
        remedy = f"write {interpreter} {word}" + (f", or {local_path}" if shutil.which(local_path) else "")
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
    warnings = [f"{key} is not in the command: write {{{key}}} where its value belongs" for key in unused]
    warnings += [f"{{{key}}} stays as it is, because {key} is not set: add {key}=VALUE" for key in unset]
    launcher = _launcher_per_rank(config, resources_of(config))
    if launcher is not None:
        warnings.append(f"{launcher.problem}; {launcher.remedy}")
    if isinstance(config.cluster, Slurm):
        word = command_of(config)[0]
        if shutil.which(word) is None and config.cluster.container.image is None:
            remedy = either(["correct it", "load its module in cluster.setup"])
            warnings.append(f"{word} is not in PATH on this machine: it must be on the nodes; {remedy}")
    return warnings
