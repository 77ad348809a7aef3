"""Where in a whole tensor the part of this rank is, and which ranks hold the same one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement

from hpctrain.run.region import Region


def local_region(tensor: Tensor) -> Region:
    """Return where in the whole tensor the part of this rank is.

    Raises:
        ValueError: the ranks hold summands of the tensor, and not parts of it.
    """
    if not isinstance(tensor, DTensor):
        return Region.whole(tuple(tensor.shape))
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise ValueError("the ranks hold summands of this tensor; redistribute it first")
    return _region(tuple(tensor.shape), tensor.device_mesh, tensor.placements)


def replicas(tensor: Tensor, world_size: int) -> tuple[int, ...]:
    """Return the ranks that hold the same part of a tensor as this one, in ascending order.

    Args:
        tensor: a DTensor of which this rank holds a part, or a tensor that all ranks have.
        world_size: number of ranks.
    """
    if not isinstance(tensor, DTensor):
        return tuple(range(world_size))
    return _replicas(tensor.device_mesh, tuple(isinstance(each, Replicate) for each in tensor.placements))


def placed_like(local: Tensor, like: Tensor, shape: Sequence[int]) -> Tensor:
    """Return this rank's part as a tensor that is placed as another one; without that one's layout, itself.

    Args:
        local: the part, of the sizes of `region_like`.
        like: a DTensor, such as the parameter of an optimizer's state, or any other tensor.
        shape: of the whole tensor.
    """
    if not isinstance(like, DTensor):
        return local
    return DTensor.from_local(
        local,
        like.device_mesh,
        _placements_like(like, shape),
        run_check=False,
        shape=cast(Any, tuple(shape)),
        stride=torch.empty(tuple(shape), device="meta").stride(),
    )


def region_like(like: Tensor, shape: Sequence[int]) -> Region:
    """Return which part of a tensor of this shape belongs to this rank, if it is placed as another one.

    A dimension is sharded as that of the other tensor if both have the same size, and otherwise not at all: the factors
    of a second moment, for example, have one dimension of their parameter.
    """
    if not isinstance(like, DTensor):
        return Region.whole(tuple(shape))
    return _region(tuple(shape), like.device_mesh, _placements_like(like, shape))


# torch computes them from scratch, which for all tensors of a model would take longer than copying them


@cache
def _region(shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Region:
    sizes, offsets = compute_local_shape_and_global_offset(cast(Any, shape), mesh, placements)
    return Region(tuple(offsets), tuple(sizes))


@cache
def _replicas(mesh: DeviceMesh, is_replicated: tuple[bool, ...]) -> tuple[int, ...]:
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this rank isn't part of the mesh"
    index: Any = tuple(slice(None) if each else own for each, own in zip(is_replicated, coordinate, strict=True))
    return tuple(sorted(mesh.mesh[index].reshape(-1).tolist()))


def _placements_like(like: DTensor, shape: Sequence[int]) -> tuple[Placement, ...]:
    if tuple(shape) == tuple(like.shape):
        return tuple(like.placements)
    return tuple(placement if _fits(placement, like.shape, shape) else Replicate() for placement in like.placements)


def _fits(placement: Placement, shape: Sequence[int], other: Sequence[int]) -> bool:
    dimension = getattr(placement, "dim", None)
    return dimension is not None and dimension < len(other) and other[dimension] == shape[dimension]
