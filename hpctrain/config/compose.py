"""Composition: Hydra's groups and overrides -> one checked `Config`; every mistake is one ConfigError."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import hydra.version
import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import setup_globals
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from hpctrain.config import schema
from hpctrain.config.cross import check
from hpctrain.config.explain import MISTAKES, Explainer, unreadable
from hpctrain.config.root import Config
from hpctrain.config.stored import to_config
from hpctrain.errors import ConfigError

PRIMARY = "train"
OPEN_NODES = re.compile(r"^cluster\.(env|sbatch)([.=])")
"""Keys whose names the user invents: the + that Hydra asks for new keys isn't needed there."""


def conf_dir() -> Path:
    """The folder of the shipped configuration: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


class Composer:
    """Composes configurations from ``conf/`` and the user's own folder.

    Args:
        config_dir: more configuration, searched before ours; None for none.

    Raises:
        ConfigError: there is no such folder.
    """

    def __init__(self, config_dir: str | None = None) -> None:
        hydra.version.setbase("1.3")
        schema.register()
        search_path = create_config_search_path(str(conf_dir()))
        self.folder = None if config_dir is None else Path(config_dir).absolute()
        if self.folder is not None:
            if not self.folder.is_dir():
                raise ConfigError("--config-dir", config_dir, "is no folder", "name the folder that holds your groups")
            search_path.prepend(provider="command-line", path=f"file://{self.folder}", anchor="main")
        GlobalHydra.instance().clear()
        self.hydra = Hydra.create_main_hydra2("hpctrain", search_path)
        self._composed: dict[tuple[str, ...], DictConfig] = {}
        self._is_group: dict[str, bool] = {}
        setup_globals()

    @property
    def loader(self) -> ConfigLoader:
        """Hydra's loader, for overrides that are yet to be parsed."""
        return self.hydra.config_loader

    def options(self, group: str) -> list[str]:
        """The options of one group."""
        return [name for name in self.loader.get_group_options(group) if not name.startswith("base_")]

    def explain(self, error: Exception, overrides: Sequence[str]) -> ConfigError:
        """The ConfigError for one of `MISTAKES`."""
        if isinstance(error, yaml.YAMLError | UnicodeDecodeError):
            return unreadable(error, self.folder)
        text = "\n".join(filter(None, (str(error), str(error.__cause__ or ""))))
        return Explainer(text, overrides, lambda: self._known(overrides, text), self.options).explain()

    @contextlib.contextmanager
    def explaining(self, overrides: Sequence[str]) -> Iterator[None]:
        """Turn `MISTAKES` into ConfigErrors.

        Args:
            overrides: as typed on the command line.
        """
        try:
            yield
        except MISTAKES as error:
            raise self.explain(error, overrides) from error

    def compose(self, overrides: Sequence[str], *, world_size: int | None = None) -> Config:
        """The checked configuration for these overrides.

        Args:
            overrides: as typed on the command line.
            world_size: ranks that already run; None: what the configuration asks for.

        Raises:
            ConfigError: an override that can't be applied, a value, or a combination of values, that can't work.
        """
        with self.explaining(overrides):
            config = to_config(self._raw(overrides))
        check(config, world_size=world_size)
        return config

    def parse(self, overrides: Sequence[str]) -> list[Override]:
        """The overrides in Hydra's grammar.

        Raises:
            ConfigError: one that can't be read.
        """
        parser, parsed = OverridesParser.create(config_loader=self.loader), []
        for override in open_overrides(overrides):
            with self.explaining([override.removeprefix("++")]):
                parsed += parser.parse_overrides([override])
        return parsed

    def hydras(self, overrides: Sequence[str], mode: RunMode) -> DictConfig:
        """What Hydra composes, its own keys included; nothing is checked.

        Args:
            overrides: in Hydra's grammar.
            mode: MULTIRUN where they may hold several values.

        Raises:
            ConfigError: a file that isn't made of keys; `MISTAKES` otherwise.
        """
        try:
            return self.hydra.compose_config(
                PRIMARY, list(overrides), mode, with_log_configuration=False, from_shell=mode == RunMode.MULTIRUN
            )
        except MISTAKES:
            raise
        except (OSError, ValueError) as error:
            # Hydra's for a file that holds a bare number, or a defaults list that is none
            raise ConfigError("configuration", " ".join(overrides), str(error), "mend the file") from error

    def _known(self, overrides: Sequence[str], text: str) -> list[str]:
        """Every key of what is chosen, for suggestions; of the defaults where that is what can't be composed."""
        found = _schema_keys(text)
        for words in (overrides, []):
            with contextlib.suppress(ConfigError, *MISTAKES):
                choices = [override for override in self.parse(words) if self._is_choice(override)]
                return sorted(found.union(_keys(self._raw([str(choice.input_line) for choice in choices]))))
        return sorted(found)

    def _raw(self, overrides: Sequence[str]) -> DictConfig:
        choices: list[Override] = []
        values: list[Override] = []
        for override in self.parse(overrides):
            (choices if self._is_choice(override) else values).append(override)
        node = copy.deepcopy(self._chosen(tuple(str(choice.input_line) for choice in choices)))
        ConfigLoaderImpl._apply_overrides_to_config(values, node)
        if node.name is None:
            node.name = _name_of(Path(str(node.hydra.runtime.choices.get("task"))).name, node)
        OmegaConf.set_struct(node, False)
        del node["hydra"]
        return node

    def _is_choice(self, override: Override) -> bool:
        key = override.key_or_group
        if key.startswith("hydra"):
            return True
        # a group's name has no dot; asking Hydra takes 40 ms each time, since it copies its whole store to answer
        if "." in key:
            return False
        if key not in self._is_group:
            self._is_group[key] = bool(self.loader.get_group_options(key))
        if not self._is_group[key]:
            return False
        value = override.value()
        if not (override.is_delete() or isinstance(value, str)):
            raise ConfigError(key, value, "is no option of a group", f"choose one of {', '.join(self.options(key))}")
        return True

    def _chosen(self, choices: tuple[str, ...]) -> DictConfig:
        # a sweep over values composes once: Hydra takes a tenth of a second for it
        if choices not in self._composed:
            self._composed[choices] = self.hydras(choices, RunMode.RUN)
        return self._composed[choices]


def open_overrides(overrides: Sequence[str]) -> list[str]:
    """Let the user add names under the open nodes without a plus sign."""
    return [f"++{override}" if OPEN_NODES.match(override) else override for override in overrides]


def _name_of(option: str, node: DictConfig) -> str:
    """What a run is called: its task's option, or the class where the option is anybody's."""
    target = OmegaConf.select(node, "task._target_") if option == "custom" else None
    return str(target).rpartition(".")[2].lower() if target else option


def _schema_keys(text: str) -> set[str]:
    """Keys of the dataclasses that a message can be about, by the full key and the type that it names."""
    group, kind = (re.search(pattern, text) for pattern in (r"full_key: (\w+)\.", r"object_type=(\w+)"))
    if group is None or kind is None:
        return set()
    schemas = list(schema.GROUPS.get(group[1], {}).values())
    # a key of SLURM's is worth suggesting for any cluster: what is wrong then is told next
    meant = schemas if group[1] == "cluster" else [one for one in schemas if one.__name__ == kind[1]]
    return {key for one in meant for key in _keys(OmegaConf.structured(one), group[1])}


def _keys(node: Any, prefix: str = "") -> list[str]:
    keys = [prefix] if prefix else []
    if isinstance(node, DictConfig):
        for key in node:
            name = str(key)
            keys += _keys(node._get_node(name), f"{prefix}.{name}" if prefix else name)
    return keys
