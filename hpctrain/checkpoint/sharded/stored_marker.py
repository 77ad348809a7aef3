"""Markers that stand for sharded tensors in a checkpoint's `state.pt`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

KEY = "stored tensor"
"""The only key of a marker, which is a dict so that plain torch can load it; its value is the tensor's name."""


def marker(name: str) -> dict[str, str]:
    """Return what stands for the tensor of this name in the checkpoint's index."""
    return {KEY: name}


def without_markers(value: Any, find: Callable[[str], Any]) -> Any:
    """Return a tree in which each marker is replaced by what ``find`` returns for its name."""
    if isinstance(value, Mapping):
        if value.keys() == {KEY}:
            return find(value[KEY])
        return {key: without_markers(item, find) for key, item in value.items()}
    if isinstance(value, list | tuple):
        found = [without_markers(item, find) for item in value]
        return tuple(found) if isinstance(value, tuple) else found
    return value
