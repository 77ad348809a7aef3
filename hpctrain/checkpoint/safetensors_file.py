"""Write weights as a safetensors file: a header that says where each tensor is, then the tensors one after the other.

The format: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from hpctrain.checkpoint.weight_stream import WeightStream
from hpctrain.errors import CheckpointError
from hpctrain.files import errors_naming

DTYPES = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of the types. Tensors are written in this order, large elements first, so that each one is aligned."""
_ORDER = {dtype: number for number, dtype in enumerate(DTYPES)}
_ALIGNMENT = 8


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
    for name, weight in weights.items():
        if weight.dtype not in DTYPES:
            kind = str(weight.dtype).removeprefix("torch.")
            raise CheckpointError(f"{name} is {kind}, which safetensors files can't hold; export to a .pt file instead")
    ordered = dict(sorted(weights.items(), key=lambda item: (_ORDER[item[1].dtype], item[0])))
    with errors_naming(path), path.open("xb") as file:
        file.write(_header(ordered))
        for weight in ordered.values():
            for piece in weight.pieces():
                file.write(piece)
                on_write(len(piece))
        file.flush()
        os.fsync(file.fileno())


def _header(weights: Mapping[str, WeightStream]) -> bytes:
    """Return the length of the header, and the header."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, weight in weights.items():
        begin, end = end, end + weight.nbytes
        entries[name] = {
            "dtype": DTYPES[weight.dtype],
            "shape": list(weight.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
