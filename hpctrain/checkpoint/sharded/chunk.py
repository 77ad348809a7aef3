"""The part of a tensor that one rank writes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hpctrain.run.checkpoint_manifest import Region


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The part of a tensor that one rank writes.

    Attributes:
        name: of the tensor in the checkpoint.
        shape: of the whole tensor.
        region: of the part.
        tensor: the part, on the CPU, of any strides.
    """

    name: str
    shape: tuple[int, ...]
    region: Region
    tensor: Tensor
