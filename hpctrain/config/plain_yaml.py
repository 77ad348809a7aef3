"""A stored configuration as plain values, read and written with yaml alone.

OmegaConf takes longer to import than all of status.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import IO, Any

import yaml

from hpctrain.files import LARGEST_BYTES, open_below, read_bytes

UNCHECKED_BYTES = 8192
"""YAML up to this size can't be nested too deeply for libyaml."""
MAX_DEPTH = 100
"""Levels that longer YAML may have."""
MAX_VALUES = 1_000_000
"""Values that YAML may have once each alias is replaced by what it stands for."""
_BLOCK = re.compile(r"(?P<key>\w+):(?:| [^\n]*)\n(?:(?:[ #]|- )[^\n]*\n|\n)*")
"""A key of the top level and its value, in block style, as hpctrain writes it."""
_SIMPLE = re.compile(
    r"(?:(?P<number>[1-9]\d{0,17})|(?!(?i:null|true|false|yes|no|on|off|y|n)\n)(?P<word>[a-zA-Z][\w-]*))\n"
)
"""A whole number, or a word that stands for itself in YAML 1.1."""
_LOADER: Any = type("PlainLoader", (getattr(yaml, "CSafeLoader", yaml.SafeLoader),), {})
# as OmegaConf reads it: a date is text. JSON has none, and no sets
for _tag in ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:binary"):
    _LOADER.add_constructor(_tag, yaml.constructor.SafeConstructor.construct_yaml_str)
_LOADER.add_constructor("tag:yaml.org,2002:set", lambda loader, node: list(loader.construct_mapping(node)))


def _text_node(dumper: Any, text: str) -> Any:
    try:
        float(text)
    except ValueError:
        return dumper.represent_str(text)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="'")


_DUMPER: Any = type("PlainDumper", (getattr(yaml, "CDumper", yaml.Dumper),), {})
_DUMPER.add_representer(str, _text_node)


def to_yaml_text(tree: Mapping[str, Any]) -> str:
    """Return YAML from which OmegaConf reads the same values: it reads some texts as numbers that PyYAML doesn't quote.

    Args:
        tree: plain values.
    """
    return str(yaml.dump(tree, Dumper=_DUMPER, default_flow_style=False, allow_unicode=True, sort_keys=False))


def read_yaml(path: Path) -> str:
    """Read YAML that others can write, and refuse what would overflow the stack or the memory of its loader.

    Raises:
        OSError: as `read_bytes`.
        ValueError: it isn't UTF-8, is nested too deeply, or refers to its own parts too often.
        YAMLError: it isn't YAML.
    """
    return _checked(read_bytes(path), path)


def _checked(data: bytes, path: Path) -> str:
    text = data.decode()
    if len(text) > UNCHECKED_BYTES or "&" in text:
        stream = io.StringIO(text)
        stream.name = str(path)  # errors in the YAML name it
        _refuse_deep(stream)
    return text


def _refuse_deep(stream: IO[str]) -> None:
    """Raise if YAML is nested too deeply for libyaml, which would end the process, or too large without its aliases."""
    count = 0
    open_collections: list[tuple[str | None, int]] = []
    sizes: dict[str, int] = {}
    for event in yaml.parse(stream, Loader=_LOADER):
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_collections.pop()
            if anchor is not None:
                sizes[anchor] = count - before
        elif isinstance(event, yaml.CollectionStartEvent):
            open_collections.append((event.anchor, count))
        elif isinstance(event, yaml.AliasEvent):
            if any(anchor == event.anchor for anchor, _ in open_collections):
                raise ValueError(f"*{event.anchor} contains itself")
            count += sizes.get(event.anchor or "", 0)
        count += 1
        if len(open_collections) > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
        if count > MAX_VALUES:
            raise ValueError(f"it has more than {MAX_VALUES} values")


def read_plain_config(path: Path) -> Mapping[str, Any]:
    """Read the configuration as plain values; empty if it can't be read, or is a link."""
    try:
        # what is read goes to services, and into a report beside it: it must be no other file of this user
        with open_below(path.parent, path.name, at_most=LARGEST_BYTES) as file:
            return parse_plain_config(file.read(), path)
    except OSError:
        return {}


def parse_plain_config(data: bytes, path: Path) -> Mapping[str, Any]:
    """Parse the configuration that a file contains; empty if that isn't possible."""
    try:
        config = yaml.load(_checked(data, path), Loader=_LOADER)
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
        if (block_values := _from_blocks(read_bytes(path).decode(), keys)) is not None:
            return block_values
    config, values = read_plain_config(path), dict[str, Any]()
    for key in keys:
        group, _, name = key.rpartition(".")
        inside = config.get(group) if group else config
        if isinstance(inside, dict) and name in inside:
            values[key] = inside[name]
    return values


def _from_blocks(text: str, keys: Collection[str]) -> dict[str, Any] | None:
    """Read keys of a text that is in hpctrain's own style; None if it isn't, and has to be parsed as a whole."""
    blocks = list(_BLOCK.finditer(text))
    if "".join(map(re.Match.group, blocks)) != text or "&" in text:
        return None
    by_key = {block["key"]: block[0] for block in blocks}
    if len(by_key) < len(blocks):
        return None
    values: dict[str, Any] = {}
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
            values[key] = _value(block, group)
    return values


def _value(block: str, key: str) -> Any:
    """The value of ``KEY: VALUE``."""
    if simple := _SIMPLE.fullmatch(block, len(key) + 2):
        return int(simple["number"]) if simple["number"] else simple["word"]
    return yaml.load(block, Loader=_LOADER)[key]


def is_program(path: Path) -> bool:
    """Whether a ``config.yaml`` is that of a program's run; False if it can't be read."""
    return "run" in read_plain_config(path)


SECRET_KEYS = ("cluster.env", "cluster.container.env", "cluster.setup", "notify.command")
"""Keys that, with those below them, are neither sent to services nor shown in reports."""


def may_be_secret(key: str) -> bool:
    """Return whether a key is one of them, however many plus signs precede it."""
    key = key.lstrip("+")
    return any(key == name or key.startswith(f"{name}.") for name in SECRET_KEYS)
