"""Compose Hydra's groups and overrides into the checked configuration of a training, a program or a sweep.

Why it is like this: docs/adr/0035-what-stays-ours.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from hpctrain.config.checks import check
from hpctrain.config.cluster import fill_from_sbatch_variables
from hpctrain.config.hydra_application import HydraApplication
from hpctrain.config.overrides import (
    MISTAKES,
    GroupOptions,
    TextKeepingParser,
    apply_override,
    as_texts,
    has_differing_text,
    keys_of,
    open_overrides,
    require_single_value,
    value_as_typed,
    with_first_value,
)
from hpctrain.config.paths import conf_dir, own_folders
from hpctrain.config.program import USAGE, default_name
from hpctrain.config.root import (
    GROUPS,
    PROGRAM_KEYS,
    SWEEP_GROUP,
    TRAINING_KEYS,
    Config,
    ProgramConfig,
    RunConfig,
    register,
    to_config,
    with_absolute_init,
)
from hpctrain.config.stored import differing_texts, to_program
from hpctrain.config.sweep import KINDS, Sweep
from hpctrain.errors import ConfigError
from hpctrain.phrases import either, scaled

PRIMARY = "train"


_composed_cache: dict[tuple[object, ...], bytes] = {}
"""What Hydra has composed in this process without folders of a user, pickled: see `compose_with_hydra`."""
MAX_BYTES = 1_000_000
"""Most bytes of an override, or of a file of options. Parsers in Python read 1 MB in seconds, and 50 MB in minutes."""


class Composer:
    """Composes configurations from ``conf/`` and the user's own folders.

    Hydra takes an option from the first folder that has it: of `--config-dir`, of hpctrain, then of `./conf`, which so
    adds options and replaces none.

    Args:
        config_dir: the folder of `--config-dir`; None for none.
        folder: that contains `conf`; None for the working directory.

    Attributes:
        config_dir: as given.
        primary: the main configuration.
        application: Hydra.
        foreign_keys: top-level keys that other runs have.
        options: of the groups.
        can_sweep: whether the command has `-m`, which an error about several values then suggests.

    Raises:
        ConfigError: the folder doesn't exist.
    """

    primary = PRIMARY
    foreign_keys = PROGRAM_KEYS
    can_sweep = True

    def __init__(self, config_dir: str | None = None, folder: Path | None = None) -> None:
        self.config_dir = config_dir
        register()
        flag_folder, here = own_folders(config_dir, folder)
        self.folders = [folder for folder in (flag_folder, here) if folder is not None]
        self.application = HydraApplication(flag_folder, here)
        self.options = GroupOptions(self.application.loader)
        self._composed: dict[tuple[str, ...], tuple[bytes, str]] = {}
        self._parsed: dict[str, list[Override]] = {}

    @contextlib.contextmanager
    def explaining(self, overrides: Sequence[str]) -> Iterator[None]:
        """Raise `MISTAKES` as ConfigErrors.

        Args:
            overrides: as typed on the command line.
        """
        try:
            yield
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            from hpctrain.config.explain import unreadable  # for mistakes alone

            raise unreadable(error, self.folders) from error
        except PermissionError as error:  # another user's folder inside one that is searched
            raise ConfigError("configuration", error.filename, "can't be read", "change its permissions") from error
        except MISTAKES as error:
            from hpctrain.config.explain import Explainer  # for mistakes alone

            text = "\n".join(filter(None, (str(error), str(error.__cause__ or ""))))
            raise Explainer(text, overrides, lambda: self._keys(overrides, text), self.options.of).explain() from error

    def compose(
        self, overrides: Sequence[str], *, world_size: int | None = None, local_world_size: int | None = None
    ) -> Config:
        """Compose and check the configuration for these overrides.

        Args:
            overrides: as typed on the command line.
            world_size: number of ranks that already run; None for what the configuration asks for.
            local_world_size: how many of them share a node; None if that isn't known.

        Raises:
            ConfigError: an override, a value or a combination of values is invalid.
        """
        self.refuse_foreign(overrides)
        with self.explaining(overrides):
            config = to_config(self._compose_node(overrides), Config)
        check(config, world_size=world_size, local_world_size=local_world_size)
        return with_absolute_init(config)

    def compose_run(self, overrides: Sequence[str]) -> RunConfig:
        """Compose and check the configuration of a run, as `compose`; a subclass composes other runs than trainings."""
        return self.compose(overrides)

    def parse(self, overrides: Sequence[str]) -> list[Override]:
        """Parse overrides by Hydra's grammar.

        Raises:
            ConfigError: an override can't be parsed, or is too long.
        """
        parsed = []
        for override in open_overrides(overrides):
            # the runs of a sweep share most of their overrides
            if override not in self._parsed:
                key, _, value = override.lstrip("+").partition("=")
                _refuse_oversized(key, f"{value[:20]}...", len(value))
                with self.explaining([override.removeprefix("++")]):
                    self._parsed[override] = self._parse_unexplained([override])
            parsed += self._parsed[override]
        return parsed

    def _parse_unexplained(self, overrides: Sequence[str]) -> list[Override]:
        parser = TextKeepingParser.create(config_loader=self.application.loader)
        return parser.parse_overrides(list(overrides))

    def sweeper(self, overrides: Sequence[str]) -> DictConfig:
        """Compose the configuration of Hydra's sweeper.

        Args:
            overrides: of the command line; they may hold several values.

        Raises:
            ConfigError: an option doesn't exist, or a file doesn't consist of keys.
        """
        # without values: those of a swept group needn't be keys of its default option
        single = (override for override in self.parse(overrides) if not override.is_sweep_override())
        choices = filter(self.options.is_choice, single)
        with self.explaining(overrides):
            node = self.compose_with_hydra([str(choice.input_line) for choice in choices], RunMode.MULTIRUN)
        sweeper: DictConfig = node.hydra.sweeper
        return sweeper

    def compose_with_hydra(self, overrides: Sequence[str], mode: RunMode = RunMode.RUN) -> DictConfig:
        """Compose with Hydra alone, its own keys included; nothing is checked.

        Args:
            overrides: in Hydra's grammar, each with one value.
            mode: MULTIRUN if a sweep chooses options of groups, which the defaults list may then leave open.

        Raises:
            ConfigError: a file doesn't consist of keys. Other mistakes raise `MISTAKES`.
        """
        if self.folders or not all(map(_is_of_package, overrides)):
            return self._compose_uncached(overrides, mode)
        # a program may compose many runs, each with a composer; hpctrain's own files don't change meanwhile, but a
        # program may store other options in Hydra's ConfigStore
        key = (conf_dir(), self.primary, mode, *overrides)
        if key not in _composed_cache:
            _composed_cache[key] = pickle.dumps(self._compose_uncached(overrides, mode))
        shared: DictConfig = pickle.loads(_composed_cache[key])
        return shared

    def _compose_uncached(self, overrides: Sequence[str], mode: RunMode) -> DictConfig:
        try:
            return self.application.loader.load_configuration(self.primary, list(overrides), mode, from_shell=False)
        except MISTAKES:
            raise  # some are ValueErrors, and have better explanations than the next line
        except (OSError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            # what Hydra raises for a file that is a bare number, for a defaults list that isn't a list, and for keys
            # below a value that is null
            raise ConfigError("configuration", " ".join(overrides), str(error), "correct the file") from error

    def refuse_foreign(self, overrides: Sequence[str]) -> None:
        """Refuse keys that only other runs, or only sweeps, have.

        Raises:
            ConfigError: there is one.
        """
        for override in overrides:
            key, _, value = override.lstrip("+~").partition("=")
            if key.partition(".")[0] == SWEEP_GROUP:
                raise ConfigError(key, value, "is a key of sweeps, which need -m", f"write -m {override}")
            if key.partition(".")[0] in self.foreign_keys:
                raise self._foreign_key(key, value)

    def _foreign_key(self, key: str, value: str) -> ConfigError:
        problem = "belongs to a program's run, not to hpctrain's own training"
        return ConfigError(key, value, problem, "write python -m hpctrain run KEY=VALUE -- COMMAND")

    def _keys(self, overrides: Sequence[str], text: str) -> list[str]:
        """Return all keys of the chosen options, for suggestions; of the defaults if those can't be composed."""
        keys = _schema_keys(text)
        for words in (overrides, []):
            with contextlib.suppress(ConfigError, *MISTAKES):
                # an explanation of these words would ask for the keys again
                parsed = map(with_first_value, self._parse_unexplained(words))
                choices = [override for override in parsed if self.options.is_choice(override)]
                return sorted(keys.union(keys_of(self._compose_node([str(choice.input_line) for choice in choices]))))
        return sorted(keys)

    def _compose_node(self, overrides: Sequence[str], *, as_typed: bool = False) -> DictConfig:
        choices: list[Override] = []
        values: list[Override] = []
        for parsed in self.parse(overrides):
            override = require_single_value(parsed, can_sweep=self.can_sweep)
            (choices if self.options.is_choice(override) else values).append(override)
        pickled, task = self._compose_options(choices)
        node: DictConfig = pickle.loads(pickled)  # five times as fast as a deepcopy of OmegaConf's nodes
        for override in values:
            apply_override(as_texts(override) if as_typed else override, node)
        self._fill_in(node, task)
        OmegaConf.set_struct(node, False)
        return node

    def _fill_in(self, node: DictConfig, task: str) -> None:
        """Replace what is null by defaults that depend on other keys or on the user."""
        if node.name is None:
            node.name = self._default_name(task, node)
        fill_from_sbatch_variables(node.cluster, os.environ)

    def _default_name(self, task: str, node: DictConfig) -> str:
        """Return the name of a run without one: its task's option, or the class for task=custom."""
        target = OmegaConf.select(node, "task._target_") if task == "custom" else None
        return str(target).rpartition(".")[2].lower() if target else task

    def _refuse_large_files(self, choice: Override) -> None:
        options = choice.value()
        for option in options if isinstance(options, list) else [options]:
            for folder in self.folders:
                with contextlib.suppress(OSError):
                    size = (folder / choice.key_or_group / f"{option}.yaml").stat().st_size
                    _refuse_oversized(choice.key_or_group, str(option), size)

    def _compose_options(self, choices: Sequence[Override]) -> tuple[bytes, str]:
        """Return the configuration of these options without Hydra's part, pickled, and the option of the task."""
        # a sweep over values composes only once, since Hydra needs a tenth of a second
        words = tuple(str(choice.input_line) for choice in choices)
        if words not in self._composed:
            for choice in choices:
                self._refuse_large_files(choice)
            node = self.compose_with_hydra(words)
            for choice in choices:
                self.options.require_own_entries(choice)
            task = Path(str(node.hydra.runtime.choices.get("task"))).name
            # three quarters of the keys are Hydra's own, and every run would copy them
            with open_dict(node):
                del node["hydra"]
            self._composed[words] = pickle.dumps(node), task
        return self._composed[words]


def _is_of_package(word: str) -> bool:
    """Whether an override sets a key, or chooses an option that is a file of hpctrain's own configuration."""
    key, _, value = word.lstrip("+~").partition("=")
    group = conf_dir() / key
    return not group.is_dir() or (group / f"{value}.yaml").is_file()


def _refuse_oversized(key: str, value: str, size: int) -> None:
    """Refuse a value or a file of options that is too large for a configuration."""
    if size > MAX_BYTES:
        problem = f"expected at most {scaled(MAX_BYTES, 'B')}, got {scaled(size, 'B')}"
        raise ConfigError(key, value, problem, "write data into a file of its own, and set the key to its path")


def _schema_keys(text: str) -> set[str]:
    """Return the keys of the dataclasses that a message is about, by the full key and the type in it."""
    group, kind = (re.search(pattern, text) for pattern in (r"full_key: (\w+)\.", r"object_type=(\w+)"))
    if group is None or kind is None:
        return set()
    schemas = list(GROUPS.get(group[1], {}).values())
    # keys of cluster=slurm are suggested for any cluster; the next message then asks for cluster=slurm
    candidates = schemas if group[1] == "cluster" else [schema for schema in schemas if schema.__name__ == kind[1]]
    return {key for schema in candidates for key in keys_of(OmegaConf.structured(schema), group[1])}


class ProgramComposer(Composer):
    """Composes `ProgramConfig` from ``conf/program.yaml``; see `Composer`.

    Args:
        command: the program and its arguments.
        config_dir: the folder of `--config-dir`; None for none.

    Raises:
        ConfigError: the folder doesn't exist, or there is no command.
    """

    primary = "program"
    foreign_keys = TRAINING_KEYS

    def __init__(self, command: Sequence[str], config_dir: str | None = None, folder: Path | None = None) -> None:
        if not command or not command[0].strip():
            raise ConfigError("run.command", " ".join(command), "there is no program to run", USAGE)
        super().__init__(config_dir, folder)
        self.command = list(command)

    def compose_run(self, overrides: Sequence[str]) -> ProgramConfig:
        """Compose and check the configuration for these overrides.

        Raises:
            ConfigError: an override, a value or a combination of values is invalid.
        """
        self.refuse_foreign(overrides)
        with self.explaining(overrides):
            config = to_program(self._compose_node(overrides), self.command)
            if any(map(has_differing_text, self.parse(overrides))):
                with_texts = self._compose_node(overrides, as_typed=True)
                # variables may refer to args
                env = to_program(with_texts, self.command).cluster.env
                config = dataclasses.replace(
                    config,
                    run=dataclasses.replace(config.run, args_as_typed=differing_texts(config, with_texts)),
                    cluster=dataclasses.replace(config.cluster, env=env),
                )
        check(config)
        return config

    def _default_name(self, task: str, node: DictConfig) -> str:  # noqa: ARG002 - a training is named after its task
        return default_name(self.command)

    def _foreign_key(self, key: str, value: str) -> ConfigError:
        problem = "belongs to hpctrain's own training, not to a program's run"
        name = key.rpartition(".")[2]
        remedy = f"pass it to the program after --; to sweep over it, add args.{name}={value} and write {{args.{name}}}"
        return ConfigError(key, value, problem, remedy)


def composer_of(command: Sequence[str] | None, config_dir: str | None) -> Composer:
    """The composer of a training, or of a program with its command."""
    return Composer(config_dir) if command is None else ProgramComposer(command, config_dir)


GRID = "; the values of a grid decide how many runs it has"


class SweepComposer(Composer):
    """Composes the group `sweep` from ``conf/sweep.yaml``; see `Composer`."""

    primary = "sweep"
    foreign_keys = frozenset()
    can_sweep = False

    def compose_sweep(self, overrides: Sequence[str]) -> Sweep:
        """Compose and check the keys of the sweep.

        Args:
            overrides: those of `sweep` alone, as typed.

        Raises:
            ConfigError: an option, a key or a value is invalid.
        """
        parsed = self.parse(overrides)
        kinds = [str(choice.value()) for choice in parsed if choice.key_or_group == SWEEP_GROUP]
        for override in parsed:
            if override.get_key_element() != override.key_or_group:
                word, _, value = str(override.input_line).partition("=")
                raise ConfigError(word, value, "must not begin with + or ~", f"write {SWEEP_GROUP}.KEY=VALUE")
            _refuse_key_of_others(override, kinds[-1] if kinds else "grid")
        with self.explaining(overrides):
            sweep = OmegaConf.to_object(self._compose_node(overrides)[SWEEP_GROUP])
        assert isinstance(sweep, Sweep)
        return sweep

    def _fill_in(self, node: DictConfig, task: str) -> None:
        """The keys of a sweep have no such defaults."""


def split_sweep(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command's overrides into those of the sweep and those of its runs."""
    sweep_overrides = [override for override in overrides if is_of_sweep(override)]
    return sweep_overrides, [override for override in overrides if not is_of_sweep(override)]


def is_of_sweep(override: str) -> bool:
    """Whether an override as typed is of the group `sweep`."""
    return override.lstrip("+~").partition("=")[0].partition(".")[0] == SWEEP_GROUP


def kinds_with(name: str) -> list[str]:
    """Return the kinds of sweeps that have a key, named without `sweep.`; all of them for a common key."""
    return [kind for kind, schema in KINDS.items() if name in {field.name for field in dataclasses.fields(schema)}]


def _refuse_key_of_others(override: Override, kind: str) -> None:
    owners = kinds_with(override.key_or_group.removeprefix(f"{SWEEP_GROUP}."))
    if owners and kind in KINDS and kind not in owners:
        grid_counts = kind == "grid" and override.key_or_group.endswith(".num_runs")
        problem = f"exists only with {SWEEP_GROUP}={either(owners)}{GRID if grid_counts else ''}"
        raise ConfigError(override.key_or_group, value_as_typed(override), problem, f"add {SWEEP_GROUP}={owners[0]}")
