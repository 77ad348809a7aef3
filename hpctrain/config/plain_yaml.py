"""A stored configuration as plain values, read with yaml alone: OmegaConf takes longer to import than all of status."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

UNCHECKED_BYTES = 8192
"""YAML up to this size can't be nested too deeply for libyaml."""
MAX_DEPTH = 100
"""Levels that longer YAML may have."""
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def refuse_deep(path: Path) -> None:
    """Raise if YAML is nested so deeply that loading it would overflow the stack, which ends the process in libyaml.

    Raises:
        OSError: it can't be read.
        ValueError: it is nested too deeply, or isn't UTF-8.
        YAMLError: it isn't YAML.
    """
    if path.stat().st_size <= UNCHECKED_BYTES:
        return
    depth = 0
    with path.open(encoding="utf-8") as file:
        for event in yaml.parse(file, Loader=_LOADER):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")


def read_plain_config(path: Path) -> Mapping[str, Any]:
    """Read the configuration as plain values; empty if it can't be read."""
    try:
        refuse_deep(path)
        config = yaml.load(path.read_bytes(), Loader=_LOADER)
    except (OSError, yaml.YAMLError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def is_program(path: Path) -> bool:
    """Whether a ``config.yaml`` is that of a program's run; False if it can't be read."""
    return "run" in read_plain_config(path)
