"""A model's weights in the safetensors format, for programs that read no pickles."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from hpctrain.checkpoint.digest import raw_bytes
from hpctrain.errors import CheckpointError

_ALIGNMENT = 8
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class Stream(Protocol):
    """Where bytes go, one after the other."""

    def write(self, data: bytes | memoryview) -> int:
        """Take all of ``data``."""
        ...


def write_safetensors(state: Mapping[str, Tensor], file: Stream) -> None:
    """Write named tensors; needs no package, and no memory beside one tensor that isn't contiguous.

    The format (github.com/huggingface/safetensors, README): the header's length as a little-endian uint64, the header
    as JSON, the tensors' elements in row-major order without gaps. Tied weights are written under each of their names.
    What isn't a tensor (a module's extra state) has no place in it and is left out.

    Args:
        state: plain name -> dense tensor on the CPU.
        file: to be closed by the caller.

    Raises:
        CheckpointError: the format has no name for a dtype.
    """
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    # large elements first: each tensor then begins at a multiple of its element's size
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in _DTYPES:
            raise CheckpointError(
                f"{name} is of {tensor.dtype}, for which safetensors has no name: set checkpoint.safetensors=false"
            )
        span = [offset, offset + tensor.nbytes]
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
        offset = span[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in names:
        file.write(raw_bytes(tensors[name]))
