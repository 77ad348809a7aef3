"""A tree of tensors and plain values as bytes, which another rank reads without executing them."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor


def packed(state: dict[str, Any]) -> Tensor:
    """Return a state as bytes, uint8 of shape [n], for `World.gather_bytes`."""
    # messages between ranks are JSON, which would turn tuples into lists, and integers as keys into strings, and takes
    # seconds for tens of megabytes
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def unpacked(data: Tensor) -> dict[str, Any]:
    """Return the state of a result of `packed`."""
    # weights_only: another rank's data must not be able to execute code
    found: dict[str, Any] = torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)
    return found
