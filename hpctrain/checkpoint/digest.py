"""One number for all weights of a model, by which runs are compared."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping

import torch
from torch import Tensor


def weights_digest(state: Mapping[str, Tensor]) -> str:
    """SHA-256 over named tensors, in hexadecimal; the same on every machine, device and world size.

    For each name in sorted order: the name in UTF-8, NUL, the dtype ("float32"), NUL, the sizes joined by commas, NUL,
    the elements in row-major order as little-endian bytes. What isn't a tensor (a module's extra state) is passed over.

    Args:
        state: plain name -> tensor of any dense dtype, on any device.
    """
    assert sys.byteorder == "little"
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name]
        if isinstance(tensor, Tensor):
            sizes = ",".join(map(str, tensor.shape))
            digest.update(f"{name}\0{str(tensor.dtype).removeprefix('torch.')}\0{sizes}\0".encode())
            digest.update(raw_bytes(tensor))
    return digest.hexdigest()


def raw_bytes(tensor: Tensor) -> memoryview:
    """The elements of a dense tensor in row-major order, little-endian; not copied where they lie so on the CPU."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
