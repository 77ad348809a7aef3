"""The part of a tensor that this rank holds: of a sharded one its shard, of any other all of it.

Importing torch's DTensor takes half a second, which runs without a mesh are spared: until the module is imported, no
tensor can be one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import Tensor

_MODULE = "torch.distributed.tensor"


def is_dtensor(tensor: Tensor) -> bool:
    """Whether the tensor is a DTensor, of which other ranks may hold other parts."""
    kind = getattr(sys.modules.get(_MODULE), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def local_part(tensor: Tensor) -> Tensor:
    """Return the part that this rank holds, which shares its memory."""
    sharded: Any = tensor
    part: Tensor = sharded._local_tensor if is_dtensor(tensor) else tensor
    return part


def local_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the parts that this rank holds, for operations element by element that DTensors don't have."""
    return [local_part(tensor) for tensor in tensors]


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor on every rank; collective for a DTensor."""
    sharded: Any = tensor
    full: Tensor = sharded.full_tensor() if is_dtensor(tensor) else tensor
    return full
