"""Write the configuration of a run as an experiment file, so that `experiment=NAME` trains it again."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import secrets
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf, open_dict

from hpctrain.config.compose import Composer, ProgramComposer
from hpctrain.config.paths import conf_dir
from hpctrain.config.plain_yaml import to_yaml_text
from hpctrain.config.root import LIST_GROUPS, ProgramConfig, RunConfig, decides_the_weights, flat, flat_values
from hpctrain.config.stored import load_run
from hpctrain.errors import ConfigError, RunDirectoryError
from hpctrain.files import read_json_or_empty, write_atomic
from hpctrain.results.ranking import Ranking
from hpctrain.results.run_result import SEED, RunResult, comparable, is_below
from hpctrain.run.config_change import trained_config
from hpctrain.run.directory import RunDirectory
from hpctrain.run.manifest import read_varied, value_text
from hpctrain.run.sweep_record import SweepRecord

_OPTION = re.compile(r"['\"]?([\w./-]+)['\"]?")
"""One option of a group, as it is typed; several are a list, or values of a sweep."""


@dataclass(frozen=True, slots=True)
class TypedCommand:
    """A command line of hpctrain.

    Attributes:
        text: as it was typed; empty if it isn't known.
        overrides: the words `KEY=VALUE`, in the order in which they were typed.
        varied: the keys that a sweep varied, with the run's values.
        config_dir: the folder of `--config-dir`, absolute; None without one.
    """

    text: str
    overrides: tuple[str, ...]
    varied: Mapping[str, str]
    config_dir: str | None

    @classmethod
    def of(cls, directory: RunDirectory) -> TypedCommand:
        """Read a run's command; one that can't be read has no words."""
        manifest = read_json_or_empty(directory.manifest)
        text = str(manifest.get("command") or "")
        try:
            words = shlex.split(text)
        except ValueError:
            words = []
        if (record := _extended_sweep(directory, words)) is not None:
            text = shlex.join(record.command)
            words = [*record.fixed, *(f"{key}={values}" for key, values in record.space.items())]
            words += [] if record.config_dir is None else [f"--config-dir={record.config_dir}"]
        words = words[: words.index("--")] if "--" in words else words
        config_dirs = [word.partition("=")[2] for word in words if word.startswith("--config-dir=")]
        config_dirs += [after for word, after in itertools.pairwise(words) if word in ("--config-dir", "-cd")]
        folder = Path(str(manifest.get("folder") or "."))
        return cls(
            text=text,
            overrides=tuple(word for word in words if "=" in word and not word.startswith("-")),
            varied=read_varied(directory),
            config_dir=os.path.normpath(folder / config_dirs[-1]) if config_dirs else None,
        )

    @property
    def keys(self) -> list[str]:
        """The keys that the command set for all runs, or varied."""
        return [_key_and_value(word)[0] for word in self.overrides]

    def options(self) -> dict[str, str]:
        """Values of keys without a dot that may be options of groups: of a sweep's values, the run's own."""
        command_options = {key: value for key, value in map(_key_and_value, self.overrides) if "." not in key}
        options = {**command_options, **{key: value for key, value in self.varied.items() if "." not in key}}
        matches = {key: _OPTION.fullmatch(value) for key, value in options.items()}
        return {key: match[1] for key, match in matches.items() if match}

    def words_of(self, groups: tuple[str, ...]) -> list[str]:
        """The words that set keys of these groups to one value for all runs."""
        parts = ((word, _key_and_value(word)[0]) for word in self.overrides)
        return [word for word, key in parts if key.partition(".")[0] in groups and key not in self.varied]


def _extended_sweep(directory: RunDirectory, words: Sequence[str]) -> SweepRecord | None:
    """The record of the sweep, with the rest of the command, if a resume added the run to it; None otherwise."""
    if "resume" not in words[:4] or not directory.path.name.isdecimal():
        return None
    with contextlib.suppress(RunDirectoryError):
        return SweepRecord.read(directory.path.parent)
    return None


def _key_and_value(override: str) -> tuple[str, str]:
    key, _, value = override.lstrip("+~").partition("=")
    return key, value


GROUP = "experiment"
SITE = ("nodes", "cluster", "code", "health", "notify")
"""Groups and keys that say where and how a run is executed. They aren't part of an experiment, unless the sweep varied
them: the command that is printed has them."""
RUN_ONLY_KEYS = (*SITE, "run_dir", "run_mode", "after", "after_failure", "resume")
"""What an experiment leaves out."""
NOT_VARIED = ("run_dir", "resume", "sweep")
"""What can't be varied, or belongs to a command and no run."""
SWEEP_ONLY_KEYS = ("cluster.max_parallel_runs", "cluster.dry_run")
"""Words of the sweep's command that its winner alone doesn't need."""


@dataclass(frozen=True, slots=True)
class ExperimentFile:
    """The place where an experiment is stored, and its name on the command line.

    Attributes:
        path: of the file.
        folder: the folder with groups that contains it, such as `conf`.
        name: the experiment's name.
        is_here: whether the folder is `./conf`, which is searched without being named.
    """

    path: Path
    folder: Path
    name: str
    is_here: bool

    @classmethod
    def at(cls, path: Path) -> ExperimentFile:
        """Return the experiment that a file would be.

        Raises:
            ConfigError: the path isn't that of an experiment, or hpctrain has one of this name.
        """
        absolute = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow a link that the user wants kept
        folder = next((parent.parent for parent in absolute.parents if parent.name == GROUP), None)
        if folder is None or absolute.suffix != ".yaml":
            remedy = "such as conf/experiment/best.yaml"
            raise ConfigError("--export", path, "is not FOLDER/experiment/NAME.yaml", f"name such a file, {remedy}")
        name = str(absolute.relative_to(folder / GROUP).with_suffix(""))
        is_here = folder == Path("conf").absolute()
        if is_here and (conf_dir() / GROUP / f"{name}.yaml").is_file() and conf_dir() != folder:
            problem = f"would never be used: hpctrain has an experiment {name}, which is found first"
            raise ConfigError("--export", path, problem, "choose another name")
        return cls(absolute, folder, name, is_here)


def export(ranking: Ranking, file: ExperimentFile, comment: str, *, force: bool, config_dir: str | None) -> str:
    """Write an experiment with the configuration of the best row's first run; a row over seeds leaves out `seed`.

    It has every key that the runs' commands set, or in which the runs differ, even if the value is today's default.

    Args:
        ranking: of all runs, at least one.
        file: to write; its folder is made if it doesn't exist.
        comment: what the run achieved, in one line.
        force: replace an existing file.
        config_dir: a folder with the user's own groups; None for the one that the run's command named.

    Returns:
        The command that trains the experiment.

    Raises:
        ConfigError: the file exists; the run's configuration can't be read, or an experiment can't express it.
    """
    if file.path.exists() and not force:
        raise ConfigError("--export", file.path, "exists", "choose another name, or add --force to replace it")
    run = ranking.rows[0].runs[0]
    for key in filter(decides_the_weights, run.changed_keys):
        problem = f"can't have {key}={run.config[key]} of {run.status.path}"
        raise ConfigError("--export", file.path, problem, "resume or warm-start from the run instead")
    command = TypedCommand.of(run.directory)
    config = load_run(trained_config(run.directory))
    folder = _config_dir(file, config_dir or command.config_dir)
    file.path.parent.mkdir(parents=True, exist_ok=True)
    composer = ProgramComposer(config.run.command, folder) if isinstance(config, ProgramConfig) else Composer(folder)
    site = [word for word in command.words_of(SITE) if word.partition("=")[0] not in SWEEP_ONLY_KEYS]
    # YAML has no texts of numbers, so they become strings
    texts = config.run.args_as_typed if isinstance(config, ProgramConfig) else {}
    target = _exported({**flat(config), **texts}, command, skip_seed=len(ranking.rows[0].runs) > 1)
    choices = _choices(composer, command)
    with _draft(file, run, command) as (draft, name):
        write_atomic(draft, _text(comment, choices, {}), durable=False)
        values = _changed(target, _composed(composer, name), always=_explicit_keys(composer, command, target, ranking))
        for name_values in ({}, {"name": config.name}):
            write_atomic(draft, _text(comment, choices, name_values | values), durable=False)
            composed_config = composer.compose_run([f"{GROUP}={name}", *site])
            if composed_config.name == config.name:
                break
        _require_same(target, composed_config, command, file.path, run)
        _publish(draft, file.path, force=force)
    words = [f"{GROUP}={file.name}", *site]
    if folder is not None:
        words = ["--config-dir", os.path.relpath(folder), *words]
    program = ["--", *config.run.command] if isinstance(config, ProgramConfig) else []
    return shlex.join(["python", "-m", "hpctrain", *(["run"] if program else []), *words, *program])


def _config_dir(file: ExperimentFile, config_dir: str | None) -> str | None:
    """The folder for `--config-dir`, with which the file is found."""
    if file.is_here or (config_dir is not None and Path(config_dir).absolute() == file.folder):
        return config_dir
    if config_dir is not None:
        remedy = f"write it to conf/{GROUP}, or to {Path(config_dir) / GROUP}"
        raise ConfigError("--export", file.path, f"would not be found together with --config-dir {config_dir}", remedy)
    return str(file.folder)


def _choices(composer: Composer, command: TypedCommand) -> dict[str, str]:
    """The options of groups that the run's command chose, by itself or through an experiment, beyond the defaults."""
    options = {key: value for key, value in command.options().items() if _is_exported(key, command)}
    choices = {key: value for key, value in options.items() if key not in LIST_GROUPS and composer.options.of(key)}
    words = [f"{key}={value}" for key, value in choices.items()]
    runtime_choices = _runtime_choices(composer, words, command)
    explicit = {key: value for key, value in choices.items() if key != GROUP}
    # what follows from them, such as the model from the task, isn't written
    default = _runtime_choices(composer, [f"{key}={value}" for key, value in explicit.items()], command)
    return explicit | {key: value for key, value in runtime_choices.items() if default.get(key) != value}


def _runtime_choices(composer: Composer, words: list[str], command: TypedCommand) -> dict[str, str]:
    with composer.explaining(words):
        choices = composer.compose_with_hydra(words).hydra.runtime.choices
    return {
        str(key): str(value)
        for key, value in choices.items()
        if value is not None and "/" not in str(key) and str(key) not in (GROUP, *LIST_GROUPS)
        if _is_exported(str(key), command)
    }


def _composed(composer: Composer, name: str) -> dict[str, Any]:
    """The values that a draft composes, with ??? for missing ones."""
    words = [f"{GROUP}={name}"]
    with composer.explaining(words):
        node = composer.compose_with_hydra(words)
        with open_dict(node):
            del node["hydra"]
        plain = OmegaConf.to_container(node)
    assert isinstance(plain, dict)
    return flat_values({str(key): value for key, value in plain.items()})


def _exported(values: Mapping[str, Any], command: TypedCommand, *, skip_seed: bool) -> dict[str, Any]:
    left_out = {"name", "run.command", *([SEED] if skip_seed else [])}
    return {key: value for key, value in values.items() if key not in left_out and _is_exported(key, command)}


def _is_exported(key: str, command: TypedCommand) -> bool:
    return key not in NOT_VARIED and (is_below(key, command.varied) or key.partition(".")[0] not in RUN_ONLY_KEYS)


def _explicit_keys(
    composer: Composer, command: TypedCommand, target: Mapping[str, Any], ranking: Ranking
) -> frozenset[str]:
    """The keys that the command varied or set, and those in which the runs differ: their defaults may change later."""
    options = {key for key in command.options() if key not in command.varied and composer.options.of(key)}
    names = [key.lstrip("+") for key in (*command.varied, *command.keys) if key not in options]
    configs = [run.config for row in ranking.rows for run in row.runs if run.config]
    return frozenset(
        key for key in target if is_below(key, names) or len({comparable(config.get(key)) for config in configs}) > 1
    )


def _changed(target: Mapping[str, Any], composed: Mapping[str, Any], always: Collection[str]) -> dict[str, Any]:
    return {
        key: value
        for key, value in target.items()
        if value != {} and (key in always or key not in composed or comparable(composed[key]) != comparable(value))
    }


def _text(comment: str, choices: Mapping[str, str], values: Mapping[str, Any]) -> str:
    lines = ["# @package _global_", f"# {' '.join(comment.split())}"]
    if choices:
        lines += ["defaults:", *(f"  - override /{group}: {option}" for group, option in choices.items())]
    tree: dict[str, Any] = {}
    for key, value in values.items():
        inside = tree
        *groups, name = key.split(".")
        for group in groups:
            inside = inside.setdefault(group, {})
        inside[name] = value
    if tree:
        lines += ["", to_yaml_text(tree)]
    return "\n".join(lines).rstrip() + "\n"


def _require_same(
    target: Mapping[str, Any], config: RunConfig, command: TypedCommand, path: Path, run: RunResult
) -> None:
    composed = _exported(flat(config), command, skip_seed=SEED not in target)
    for key in sorted(target.keys() | composed.keys()):
        value, composed_value = (values.get(key) or None for values in (target, composed))
        if comparable(value) != comparable(composed_value):
            problem = f"can't have {key}={value_text(value)} of {run.status.path}"
            remedy = f"the file would make it {value_text(composed_value)}; resume or warm-start from the run instead"
            raise ConfigError("--export", path, problem, remedy)


@contextlib.contextmanager
def _draft(file: ExperimentFile, run: RunResult, command: TypedCommand) -> Iterator[tuple[Path, str]]:
    """A file next to the final one, which Hydra composes under its own name; and that name.

    Raises:
        ConfigError: an experiment can't express the configuration.
    """
    draft = file.path.with_name(f"{file.path.stem}_{secrets.token_hex(4)}.yaml")
    try:
        yield draft, str(draft.relative_to(file.folder / GROUP).with_suffix(""))
    except ConfigError as error:
        if error.key == "--export":
            raise
        problem = f"can't express the configuration of {run.status.path}: {error.key} {error.problem}"
        remedy = f"type this in the folder of the command that made it: {command.text or 'it is not recorded'}"
        raise ConfigError("--export", file.path, problem, remedy) from error
    finally:
        draft.unlink(missing_ok=True)


def _publish(draft: Path, path: Path, *, force: bool) -> None:
    if force:
        draft.replace(path)
        return
    try:
        os.link(draft, path)  # unlike a rename, it replaces nothing
    except FileExistsError:
        raise ConfigError("--export", path, "exists", "choose another name, or add --force to replace it") from None
