"""Write weights that don't fit into memory together as a safetensors file.

The safetensors package can only write tensors that are all in memory. So it makes the header, from tensors without
elements, and this module writes the elements piece by piece.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors import SafetensorError, TensorSpec, serialize

from hpctrain.checkpoint.weight_stream import WeightStream
from hpctrain.errors import CheckpointError
from hpctrain.files import errors_naming

_LENGTH_BYTES = 8
"""Size of the header's length, which precedes the header. The header is padded to a multiple of it."""


def write_safetensors(path: Path, weights: Mapping[str, WeightStream], on_write: Callable[[int], None]) -> None:
    """Write a new file, and make it durable. For the same tensors it has the same bytes as the package's `save_file`.

    Args:
        path: must not exist.
        weights: by name.
        on_write: called with the number of bytes after each write.

    Raises:
        CheckpointError: the format lacks the type of a tensor.
        OSError: the file can't be written; a part of it may be left.
    """
    header, names = _header(weights)
    with errors_naming(path), path.open("xb") as file:
        file.write(header)
        for name in names:
            for piece in weights[name].pieces():
                file.write(piece)
                on_write(len(piece))
        file.flush()
        os.fsync(file.fileno())


def _header(weights: Mapping[str, WeightStream]) -> tuple[bytes, list[str]]:
    """Return the bytes before the elements, and the names in the order of their elements."""
    empty = {}
    for name, weight in weights.items():
        kind = str(weight.dtype).removeprefix("torch.")
        try:
            empty[name] = TensorSpec(dtype=kind, shape=(0, *weight.shape), data_ptr=0, data_len=0)
        except SafetensorError as error:
            problem = f"{name} is {kind}, which safetensors files can't hold; export to a .pt file instead"
            raise CheckpointError(problem) from error
    entries = json.loads(serialize(empty, metadata={"format": "pt"})[_LENGTH_BYTES:])
    names = [name for name in entries if name in weights]
    end = 0
    for name in names:
        begin, end = end, end + weights[name].nbytes
        entries[name]["shape"].pop(0)
        entries[name]["data_offsets"] = [begin, end]
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text, names
