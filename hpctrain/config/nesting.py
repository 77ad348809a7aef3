"""How deeply a file of YAML is nested, found before it is loaded."""

from __future__ import annotations

import yaml

DEEPEST = 100
"""Levels that a configuration may have."""
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def refuse_deep(data: bytes) -> None:
    """Raise if YAML is nested so deeply that loading it would overflow the stack, which ends the process in libyaml.

    Raises:
        ValueError: it is.
        YAMLError: it isn't YAML.
    """
    depth = 0
    for event in yaml.parse(data, Loader=_LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise ValueError(f"it is nested more than {DEEPEST} levels deep")
