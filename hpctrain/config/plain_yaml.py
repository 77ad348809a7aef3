"""A stored configuration as plain values, read with yaml alone: OmegaConf takes longer to import than all of status."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from hpctrain.files import open_below, read_bytes

UNCHECKED_BYTES = 8192
"""YAML up to this size can't be nested too deeply for libyaml."""
MAX_DEPTH = 100
"""Levels that longer YAML may have."""
_BLOCK = re.compile(r"(?P<key>\w+):(?:| [^\n]*)\n(?:(?:[ #]|- )[^\n]*\n|\n)*")
"""A key of the top level and its value, in block style, as hpctrain writes it."""
_SIMPLE = re.compile(
    r"(?:(?P<number>[1-9]\d{0,17})|(?!(?i:null|true|false|yes|no|on|off|y|n)\n)(?P<word>[a-zA-Z][\w-]*))\n"
)
"""A whole number, or a word that stands for itself in YAML 1.1."""
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def refuse_deep(path: Path) -> None:
    """Raise if YAML is nested so deeply that loading it would overflow the stack, which ends the process in libyaml.

    Raises:
        OSError: it can't be read.
        ValueError: it is nested too deeply, or isn't UTF-8.
        YAMLError: it isn't YAML.
    """
    if path.stat().st_size > UNCHECKED_BYTES:
        _refuse_deep(path.read_bytes())


def _refuse_deep(data: bytes) -> None:
    depth = 0
    for event in yaml.parse(data.decode(), Loader=_LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")


def read_plain_config(path: Path) -> Mapping[str, Any]:
    """Read the configuration as plain values; empty if it can't be read, or is a link."""
    try:
        # what is read goes to services, and into a report beside it: it must be no other file of this user
        with open_below(path.parent, path.name) as file:
            return parse_plain_config(file.read())
    except OSError:
        return {}


def parse_plain_config(data: bytes) -> Mapping[str, Any]:
    """Parse a configuration; empty if that isn't possible."""
    try:
        if len(data) > UNCHECKED_BYTES:
            _refuse_deep(data)
        config = yaml.load(data, Loader=_LOADER)
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def read_plain_values(path: Path, keys: Collection[str]) -> dict[str, Any]:
    """Read a few keys of the configuration; what the file lacks, or can't be read, is left out.

    Parsing all of it takes longer than all else that the table of runs reads of a run.

    Args:
        path: of the file.
        keys: full names, of one or two levels, such as `name` and `trainer.max_steps`.

    Returns:
        The plain values by full name.
    """
    with contextlib.suppress(OSError, ValueError, yaml.YAMLError, RecursionError):
        # an alias of an anchor under another key, for example, is an error here
        if (found := _from_blocks(read_bytes(path).decode(), keys)) is not None:
            return found
    config = read_plain_config(path)
    pairs = ((key, *key.partition(".")[::2]) for key in keys)
    groups = ((key, name, config.get(group) if name else config, group) for key, group, name in pairs)
    return {
        key: inside[name or group]
        for key, name, inside, group in groups
        if isinstance(inside, dict) and (name or group) in inside
    }


def _from_blocks(text: str, keys: Collection[str]) -> dict[str, Any] | None:
    """Read keys of a text that is in hpctrain's own style; None if it isn't, and has to be parsed as a whole."""
    blocks = list(_BLOCK.finditer(text))
    if "".join(map(re.Match.group, blocks)) != text:
        return None
    by_key = {block["key"]: block[0] for block in blocks}
    if len(by_key) < len(blocks):
        return None
    found: dict[str, Any] = {}
    for key in keys:
        group, _, name = key.partition(".")
        block = by_key.get(group, "")
        if name and (line := re.search(rf"^  {name}: (.*)\n(?!   )", block, re.MULTILINE)):
            block = line[0][2:]
            group = name
        elif name and not re.search(rf"\b{name}\b", block):
            continue
        elif name or len(block) > UNCHECKED_BYTES // 4:  # characters may have several bytes
            return None
        if block:
            found[key] = _value(block, group)
    return found


def _value(block: str, key: str) -> Any:
    """The value of ``KEY: VALUE``."""
    if simple := _SIMPLE.fullmatch(block, len(key) + 2):
        return int(simple["number"]) if simple["number"] else simple["word"]
    return yaml.load(block, Loader=_LOADER)[key]


def is_program(path: Path) -> bool:
    """Whether a ``config.yaml`` is that of a program's run; False if it can't be read."""
    return "run" in read_plain_config(path)
