"""Messages between ranks as bytes, read without executing them: JSON, or a state in the format of `torch.save`.

Never a plain pickle, as torch's collectives for objects send: an intruder in the place of a rank could run code.
"""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import torch
from torch import Tensor

DTYPES = {"uint8": torch.uint8, "int64": torch.int64}
"""The types of the tensors that a message may contain; those of random states."""


def encode(value: Any) -> Tensor:
    """Encode a value as a tensor of bytes.

    Args:
        value: of JSON's types, tuples (which arrive as lists) and tensors of `DTYPES`.

    Raises:
        TypeError: the value contains anything else, or a dict with a key that isn't a string.
    """
    _refuse_other_keys(value)
    return torch.frombuffer(bytearray(json.dumps(value, default=_tensor_as_json).encode()), dtype=torch.uint8)


def decode(data: Tensor) -> Any:
    """Decode a result of `encode`, which another rank sent.

    Raises:
        ValueError: the data isn't such a result.
    """
    return json.loads(data.numpy().tobytes(), object_hook=_tensor_from_json)


def _refuse_other_keys(value: object) -> None:
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):  # json would send another key: 1 as "1"
                raise TypeError(f"expected keys that are strings, got {key!r}")
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            _refuse_other_keys(item)


def _tensor_as_json(value: object) -> dict[str, str]:
    for name, dtype in DTYPES.items():
        if isinstance(value, Tensor) and value.dtype == dtype and value.dim() == 1:
            return {"tensor": base64.b64encode(value.cpu().numpy().tobytes()).decode(), "dtype": name}
    raise TypeError(f"expected a value of JSON's types, or a tensor of one dimension, got {value!r}")


def _tensor_from_json(record: dict[str, Any]) -> Any:
    if record.keys() != {"tensor", "dtype"}:
        return record
    try:
        data, dtype = bytearray(base64.b64decode(record["tensor"])), DTYPES[record["dtype"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"expected the data of a tensor, and one of {', '.join(DTYPES)}, got {record!r}") from error
    # frombuffer refuses an empty buffer
    return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)


def pack(state: dict[str, Any]) -> Tensor:
    """Return a state as bytes, uint8 of shape [n], for `World.gather_bytes`."""
    # messages between ranks are JSON, which would turn tuples into lists, and integers as keys into strings, and takes
    # seconds for tens of megabytes
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def unpack(data: Tensor) -> dict[str, Any]:
    """Return the state of a result of `pack`."""
    # weights_only: another rank's data must not be able to execute code
    state: dict[str, Any] = torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)
    return state
