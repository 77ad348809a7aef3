"""Layout of a sharded tensor: the part that this rank holds, and the ranks that hold the same one."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement, Shard, _StridedShard

from hpctrain.parallel.local_part import local_part
from hpctrain.run.checkpoint_manifest import Region

Spans: TypeAlias = tuple[tuple[int, int], ...]
"""Where consecutive indices of a dimension begin and end; in ascending order, and apart from each other."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor that a rank holds.

    Most parts are one box. A part of a weight that contains several matrices, such as those of queries, keys and
    values, is several.

    Attributes:
        region: in the whole tensor.
        place: in the rank's part.
    """

    region: Region
    place: Region


def local_pieces(tensor: Tensor) -> tuple[Piece, ...]:
    """Return the boxes of the whole tensor that are the part of this rank; at least one, which may be empty.

    Raises:
        ValueError: the ranks hold summands of the tensor, and not parts of it.
    """
    if not isinstance(tensor, DTensor):
        return _all_of(tuple(tensor.shape))
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise ValueError("the ranks hold summands of this tensor; redistribute it first")
    pieces = _pieces(tuple(tensor.shape), *_place_in(tensor.device_mesh), tuple(tensor.placements))
    assert local_sizes(pieces) == tuple(local_part(tensor).shape), f"{tensor.placements} of {tuple(tensor.shape)}"
    return pieces


def layout(tensor: Tensor) -> Hashable:
    """Return a key for how a tensor is divided; None for a tensor that isn't a DTensor.

    Of tensors with the same shape and key, a rank has the same part.
    """
    return (tensor.device_mesh, tuple(tensor.placements)) if isinstance(tensor, DTensor) else None


def local_sizes(pieces: Sequence[Piece]) -> tuple[int, ...]:
    """Return the sizes of the part that these boxes make up."""
    last = pieces[-1].place
    return tuple(begin + size for begin, size in zip(last.offsets, last.sizes, strict=True))


def sizes_along(tensor: Tensor, dimension: str) -> tuple[int, ...]:
    """Return the sizes of this rank's part, if the tensor were cut in one dimension of the mesh only.

    Along `tensor`, that is what FSDP2 gathers of a parameter: the whole of it, or of a divided layer this rank's share.

    Args:
        tensor: a DTensor on a mesh with named dimensions, or a tensor that this rank has whole.
        dimension: of the mesh; that of the tensor may lack it.
    """
    if not isinstance(tensor, DTensor):
        return tuple(tensor.shape)
    names = tensor.device_mesh.mesh_dim_names or ()
    placements = tuple(
        placement if name == dimension else Replicate()
        for name, placement in zip(names, tensor.placements, strict=True)
    )
    return local_sizes(_pieces(tuple(tensor.shape), *_place_in(tensor.device_mesh), placements))


def replicas(tensor: Tensor, world_size: int, mesh: DeviceMesh | None = None) -> tuple[int, ...]:
    """Return the ranks that hold the same part of a tensor as this one, in ascending order.

    Args:
        tensor: a DTensor of which this rank holds a part, or a tensor that all ranks have.
        world_size: number of ranks.
        mesh: of all ranks, if that of the tensor has only some of its dimensions; both have names for them.
    """
    if not isinstance(tensor, DTensor):
        return tuple(range(world_size))
    device_mesh = tensor.device_mesh
    is_cut = [not isinstance(placement, Replicate) for placement in tensor.placements]
    if mesh is not None:
        sharded = {name for name, cut in zip(device_mesh.mesh_dim_names or (), is_cut, strict=True) if cut}
        is_cut = [name in sharded for name in mesh.mesh_dim_names or ()]
        device_mesh = mesh
    coordinate, _ = _place_in(device_mesh)
    index: Any = tuple(place if cut else slice(None) for cut, place in zip(is_cut, coordinate, strict=True))
    return tuple(sorted(device_mesh.mesh[index].reshape(-1).tolist()))


def placed_like(local: Tensor, like: Tensor, shape: Sequence[int]) -> Tensor:
    """Return this rank's part as a tensor that is placed as another one; without that one's layout, itself.

    Args:
        local: the part, of the sizes of `pieces_like`.
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


def pieces_like(like: Tensor, shape: Sequence[int]) -> tuple[Piece, ...]:
    """Return which boxes of a tensor of this shape belong to this rank, if it is placed as another one.

    A dimension is sharded as that of the other tensor if both have the same size, and otherwise not at all: the factors
    of a second moment, for example, have one dimension of their parameter.
    """
    if not isinstance(like, DTensor):
        return _all_of(tuple(shape))
    return _pieces(tuple(shape), *_place_in(like.device_mesh), _placements_like(like, shape))


def _all_of(shape: tuple[int, ...]) -> tuple[Piece, ...]:
    return (Piece(Region.whole(shape), Region.whole(shape)),)


# computing them for all tensors of a model would take longer than copying these


@cache
def _pieces(
    shape: tuple[int, ...], coordinate: tuple[int, ...], sizes: tuple[int, ...], placements: tuple[Placement, ...]
) -> tuple[Piece, ...]:
    dimensions = [_with_places(spans) for spans in _spans(shape, coordinate, sizes, placements)]
    return tuple(
        Piece(_box([region for region, _ in spans]), _box([place for _, place in spans]))
        for spans in product(*dimensions)
    )


def _box(spans: Sequence[tuple[int, int]]) -> Region:
    return Region(tuple(begin for begin, _ in spans), tuple(size for _, size in spans))


def _with_places(spans: Spans) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return begin and size of each span, in the whole dimension and in the rank's part."""
    placed_spans, begins_at = [], 0
    for begin, end in spans or ((0, 0),):
        placed_spans.append(((begin, end - begin), (begins_at, end - begin)))
        begins_at += end - begin
    return placed_spans


def _spans(
    shape: tuple[int, ...], coordinate: tuple[int, ...], sizes: tuple[int, ...], placements: tuple[Placement, ...]
) -> list[Spans]:
    spans: list[Spans] = [((0, size),) for size in shape]
    # from the outermost dimension of the mesh inwards, as torch defines placements
    for place, size, placement in zip(coordinate, sizes, placements, strict=True):
        if isinstance(placement, _StridedShard):
            dimension_spans, factor = spans[placement.dim], cast(int, placement.split_factor)
            chunks = (_chunk(_chunk(dimension_spans, number, factor), place, size) for number in range(factor))
            spans[placement.dim] = _joined(span for chunk in chunks for span in chunk)
        elif isinstance(placement, Shard):
            spans[placement.dim] = _chunk(spans[placement.dim], place, size)
    return spans


def _place_in(mesh: DeviceMesh) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the coordinate of this rank, and the sizes of the mesh."""
    coordinate: Any = mesh.get_coordinate()
    assert coordinate is not None, "this rank isn't part of the mesh"
    # mesh.mesh is computed at each access
    return tuple(coordinate), tuple(mesh.shape)


def _chunk(spans: Spans, number: int, count: int) -> Spans:
    """Return one of so many chunks of the indices, as `torch.chunk` divides them."""
    total = sum(end - begin for begin, end in spans)
    size = math.ceil(total / count)
    first, last = number * size, min((number + 1) * size, total)
    chunk, before = [], 0
    for begin, end in spans:
        overlap = max(begin, begin + first - before), min(end, begin + last - before)
        if overlap[0] < overlap[1]:
            chunk.append(overlap)
        before += end - begin
    return tuple(chunk)


def _joined(spans: Iterable[tuple[int, int]]) -> Spans:
    joined: list[tuple[int, int]] = []
    for begin, end in spans:
        if joined and joined[-1][1] == begin:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((begin, end))
    return tuple(joined)


def _placements_like(like: DTensor, shape: Sequence[int]) -> tuple[Placement, ...]:
    if tuple(shape) == tuple(like.shape):
        return tuple(like.placements)
    return tuple(placement if _fits(placement, like.shape, shape) else Replicate() for placement in like.placements)


def _fits(placement: Placement, like_shape: Sequence[int], shape: Sequence[int]) -> bool:
    dimension = getattr(placement, "dim", None)
    return dimension is not None and dimension < len(shape) and shape[dimension] == like_shape[dimension]
