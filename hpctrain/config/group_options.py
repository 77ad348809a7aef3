"""The options of the groups, as Hydra finds them in all folders."""

from __future__ import annotations

import re

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.types import Override
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig

from hpctrain.config import schema
from hpctrain.config.near_misses import option_instead
from hpctrain.errors import ConfigError


class GroupOptions:
    """The options of all groups.

    Args:
        loader: Hydra's, with the folders to search.
    """

    def __init__(self, loader: ConfigLoader) -> None:
        self._loader = loader
        self._is_group: dict[str, bool] = {}

    def of(self, group: str) -> list[str]:
        """Return the options of one group."""
        return [name for name in self._loader.get_group_options(group) if not name.startswith("base_")]

    def chosen_by(self, override: Override) -> bool:
        """Whether an override chooses options of a group, rather than set a key.

        Raises:
            ConfigError: it does, but its value can't be an option.
        """
        key = override.key_or_group
        if key.startswith("hydra"):
            return True
        # a group's name has no dot; asking Hydra takes 40 ms each time, since it copies its whole store to answer
        if "." in key:
            return False
        if key not in self._is_group:
            self._is_group[key] = bool(self._loader.get_group_options(key))
        if not self._is_group[key]:
            return False
        value = override.value()
        names = value if key in schema.LIST_GROUPS and isinstance(value, list) else [value]
        if not (override.is_delete() or all(map(_may_be_file, names))):
            raise ConfigError(key, value, f"is not an option of the group {key}", self._remedy(key, value))
        return True

    def require_own_entries(self, choice: Override) -> None:
        """Refuse several options of a list whose files have an entry by the same name: the last would replace the rest.

        Entries that a file has from its own defaults list don't count: it is meant to change them.
        """
        group, options = choice.key_or_group, choice.value()
        if group not in schema.LIST_GROUPS or not isinstance(options, list):
            return
        sources, owners = self._loader.get_sources(), dict[object, str]()
        for option in map(str, options):
            path = f"{group}/{option}"
            # Hydra, too, takes the first source that has it
            found = next((source.load_config(path) for source in sources if source.is_config(path)), None)
            for name in _entries(group, option, found):
                if name in owners:
                    problem = f"{owners[name]} and {option} both have the entry {name}, and only one would count"
                    raise ConfigError(group, f"[{','.join(options)}]", problem, "rename the entry in one of them")
                owners[name] = option

    def _remedy(self, group: str, value: object) -> str:
        if isinstance(value, dict) and value and group not in schema.LIST_GROUPS:
            keys = [f"{group}.{name}" for name in value]
            return f"set its keys one by one: {', '.join(keys[:3])}{', ...' if len(keys) > 3 else ''}"
        if (instead := option_instead(group, value)) is not None:
            return instead
        names = ", ".join(self.of(group))
        if group in schema.LIST_GROUPS:
            return f"write {group}=[] for none, or choose from {names}: {group}=[NAME,NAME]"
        return f"choose one of {names}"


def _entries(group: str, option: str, file: ConfigResult | None) -> set[str]:
    """Return the entries of a group that a file has, wherever its header `# @package` places it."""
    if file is None or not isinstance(file.config, DictConfig):
        return set()
    package = (file.header.get("package") or "_group_").replace("_group_", group).replace("_name_", option)
    names = {str(name) for name in file.config} - {"defaults"}
    if package == "_global_":
        return {str(name) for name in file.config.get(group) or ()}
    if package == group:
        return names
    first, _, below = package.removeprefix("_global_.").partition(".")
    return {below.partition(".")[0]} if first == group and below and names else set()


def _may_be_file(option: object) -> bool:
    """Whether an option may be a file's name; Hydra's own errors about others don't name the group."""
    return isinstance(option, str) and len(option) < 250 and option != "???" and not re.search(r"\0|\$\{", option)
