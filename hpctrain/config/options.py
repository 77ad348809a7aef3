"""Groups, options and keys, read from files and schemas for tab completion: composing takes a third of a second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from hpctrain.config.root import GROUPS, LIST_GROUPS, Config

MAX_BASES = 8
"""Options that extend one another; more are probably a circle."""


def groups_of(folders: Sequence[Path]) -> list[str]:
    """Return the groups with options in these folders."""
    return sorted({path.parent.name for folder in folders for path in folder.glob("*/*.yaml")} - {"hydra"})


def options_of(group: str, folders: Sequence[Path]) -> list[str]:
    """Return the options of a group, with `null` for one that needs none."""
    found = {path.stem for folder in folders for path in (folder / group).glob("*.yaml")}
    return sorted(found | ({"null"} if group == "experiment" else set()))


def top_level_keys() -> list[str]:
    """Return the keys outside of any group."""
    return [field.name for field in fields(Config) if field.name not in GROUPS]


def keys_of(group: str, chosen: str | None, folders: Sequence[Path]) -> list[str]:
    """Return the full names of a group's keys.

    Args:
        group: its name.
        chosen: the option on the command line; None for the default.
        folders: of configuration, in the order in which they are searched.
    """
    if group in LIST_GROUPS:
        return [f"{group}.{name}.{key}" for name in _listed(chosen) for key in _names_of(group, name, folders)]
    schemas = GROUPS.get(group, {})
    option = chosen or _default(group, folders)
    found: dict[str, None] = {}
    for _ in range(MAX_BASES):
        if option is None or option.startswith("base_"):
            break
        node = _read(group, option, folders)
        own = node.get(group, {}) if "experiment" not in group and group in node else node
        found |= dict.fromkeys(key for key in own if key not in ("defaults", *GROUPS))
        option = next((name for name in map(_extended, node.get("defaults") or []) if name), None)
    schema = schemas.get((option or "").removeprefix("base_"))
    # without a choice, that of the model depends on the task
    for each in [schema] if schema or chosen else schemas.values():
        found |= dict.fromkeys(_names(each) if each else ())
    return [key for name in found if (key := f"{group}.{name}") != "cluster.kind"]  # set by the choice alone


def _listed(chosen: str | None) -> list[str]:
    """Return the options of a list as it is typed, such as `[first,second]`; unfinished lists, too."""
    return [name.strip() for name in (chosen or "").strip("[]").split(",") if name.strip()]


def _names_of(group: str, name: str, folders: Sequence[Path]) -> list[str]:
    """Return the keys of one option of a group of lists, which are below its name."""
    schema, entry = GROUPS[group].get(name), _read(group, name, folders).get(name)
    own = [key for key in entry if key != "_target_"] if isinstance(entry, dict) else []
    return [*(key for key in (_names(schema) if schema else ()) if key != "_target_"), *own]


def _names(schema: type, prefix: str = "") -> list[str]:
    hints = get_type_hints(schema)
    return [
        name
        for field in fields(schema)
        for name in (
            _names(hints[field.name], f"{prefix}{field.name}.")
            if is_dataclass(hints[field.name])
            else [f"{prefix}{field.name}"]
        )
    ]


def _default(group: str, folders: Sequence[Path]) -> str | None:
    for folder in folders:
        if (folder / "train.yaml").is_file():
            choices = yaml.safe_load((folder / "train.yaml").read_text())["defaults"]
            return next((choice[group] for choice in choices if isinstance(choice, dict) and group in choice), None)
    return None


def _read(group: str, option: str, folders: Sequence[Path]) -> dict[str, Any]:
    for folder in folders:
        path = folder / group / f"{option}.yaml"
        if path.is_file():
            node = yaml.safe_load(path.read_text())
            return node if isinstance(node, dict) else {}
    return {}


def _extended(default: object) -> str | None:
    """Return the option of the same group that an entry of a defaults list extends."""
    if not isinstance(default, str) or default == "_self_":
        return None
    return default.partition("@")[0]
