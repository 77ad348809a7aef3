"""Read a checkpoint of which each rank wrote a part."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.sharded.stored_marker import without_markers
from hpctrain.checkpoint.sharded.stored_tensor import StoredTensor, open_index
from hpctrain.errors import CheckpointError
from hpctrain.files import read_bytes
from hpctrain.run.checkpoint_manifest import INDEX, decode_index

LARGEST_INDEX_BYTES = 2**30
"""Of the index: it has a line per part that a rank wrote of a tensor."""
MODEL_PREFIX = "model."
"""Begins the names of the model's tensors."""


def read_parts(path: Path, content: Any) -> dict[str, Any]:
    """Return the fields of a `Snapshot`, with a `StoredTensor` for each tensor of which ranks wrote parts.

    Args:
        path: directory of the checkpoint.
        content: of its `state.pt`.

    Raises:
        CheckpointError: its files don't fit together, or can't be read.
    """
    try:
        tensors = open_index(path, decode_index(read_bytes(path / INDEX, at_most=LARGEST_INDEX_BYTES)))
    except OSError as error:
        raise CheckpointError(f"{path / INDEX} can't be read: {error.strerror}") from error
    find = partial(_find, tensors, path)
    model: dict[str, Any] = {
        name.removeprefix(MODEL_PREFIX): tensor for name, tensor in tensors.items() if name.startswith(MODEL_PREFIX)
    }
    return {
        "model": model | content["model"],
        "optimizer": without_markers(content["optimizer"], find),
        "state": without_markers(content["state"], find),
    }


def whole_tensors(value: Any) -> Any:
    """Return a tree of saved values in which each `StoredTensor` is read as a whole."""
    if isinstance(value, StoredTensor):
        return value.read()
    if isinstance(value, Mapping):
        return {key: whole_tensors(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        found = [whole_tensors(item) for item in value]
        return tuple(found) if isinstance(value, tuple) else found
    return value


def _find(tensors: dict[str, StoredTensor], path: Path, name: str) -> StoredTensor:
    if name not in tensors:
        raise CheckpointError(f"{path / INDEX} lacks the tensor {name}, to which state.pt refers")
    return tensors[name]
