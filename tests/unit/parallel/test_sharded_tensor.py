"""Where the parts of tensors are that ranks of a mesh with several dimensions share."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from hpctrain.parallel.sharded_tensor import local_pieces, local_sizes, pieces_like, replicas, sizes_along

REPLICAS, SHARDS, RANKS = 2, 2, 2
"""Of a mesh with the dimensions replicate, shard and tensor."""


def of_rank(rank, names=("replicate", "shard", "tensor")):
    """The mesh as one of eight ranks sees it, in a group that sends nothing."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
    mesh = init_device_mesh("cpu", (REPLICAS, SHARDS, RANKS), mesh_dim_names=("replicate", "shard", "tensor"))
    return mesh, mesh[names]


@pytest.fixture(autouse=True)
def _no_group():
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def chunk(tensor, count, number, dim=0):
    """The last chunks may be missing."""
    chunks = tensor.chunk(count, dim)
    return chunks[number] if number < len(chunks) else tensor.narrow(dim, 0, 0)


def columns(whole, shard, tensor):
    """`ColwiseParallel` cuts the rows of a weight, and FSDP2 cuts them again."""
    return chunk(chunk(whole, RANKS, tensor), SHARDS, shard)


def rows(whole, shard, tensor):
    """`RowwiseParallel` cuts the columns, FSDP2 the rows."""
    return chunk(chunk(whole, SHARDS, shard), RANKS, tensor, 1)


def fused(whole, shard, tensor):
    """`FusedColumnwise` cuts the rows of each of three matrices, FSDP2 the columns."""
    own = torch.cat([matrix.chunk(RANKS)[tensor] for matrix in whole.chunk(3)])
    return own.chunk(SHARDS, 1)[shard]


def alone(whole, shard, _tensor):
    """No plan divides it."""
    return chunk(whole, SHARDS, shard)


CUTS = {
    columns: (Replicate(), _StridedShard(0, split_factor=RANKS), Shard(0)),
    rows: (Replicate(), Shard(0), Shard(1)),
    fused: (Replicate(), Shard(1), _StridedShard(0, split_factor=3)),
}


def parts(cut, shape):
    """Each rank's part, its pieces, and the ranks that hold the same."""
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    for rank in range(8):
        names = ("replicate", "shard") if cut is alone else ("replicate", "shard", "tensor")
        root, mesh = of_rank(rank, names)
        local = cut(whole, rank // RANKS % SHARDS, rank % RANKS)
        placements = CUTS.get(cut, (Replicate(), Shard(0)))
        tensor = DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
        yield rank, whole, local, tensor, replicas(tensor, 8, root)
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("cut", "shape"),
    [(fused, (12, 4)), *itertools.product([columns, rows, alone], [(12, 4), (13, 6), (3, 2)])],
)
def test_the_pieces_of_all_ranks_are_the_whole_tensor(cut, shape):
    seen = torch.zeros(shape, dtype=torch.int64)
    for rank, whole, local, tensor, same in parts(cut, shape):
        pieces = local_pieces(tensor)
        assert local_sizes(pieces) == tuple(local.shape)
        assert pieces == pieces_like(tensor, shape)
        for piece in pieces:
            assert torch.equal(local[piece.place.slices()], whole[piece.region.slices()])
            if rank == same[0]:
                seen[piece.region.slices()] += 1
    assert torch.equal(seen, torch.ones_like(seen)), "one rank writes each element"


def test_what_is_gathered_of_a_divided_weight_is_a_ranks_share_of_it():
    found = {
        cut: [sizes_along(tensor, "tensor") for *_, tensor, _ in parts(cut, (13, 6))] for cut in (columns, rows, alone)
    }
    assert found == {columns: [(7, 6), (6, 6)] * 4, rows: [(13, 3)] * 8, alone: [(13, 6)] * 8}
    assert {sizes_along(tensor, "tensor") for *_, tensor, _ in parts(fused, (12, 4))} == {(6, 4)}


def test_the_ranks_with_the_same_part():
    assert {same for *_, same in parts(rows, (12, 4))} == {(0, 4), (1, 5), (2, 6), (3, 7)}
    assert {same for *_, same in parts(alone, (12, 4))} == {(0, 1, 4, 5), (2, 3, 6, 7)}


def test_a_weight_of_several_matrices_is_a_piece_of_each():
    *_, tensor, _ = next(iter(parts(fused, (12, 4))))
    assert [piece.region.offsets for piece in local_pieces(tensor)] == [(0, 0), (4, 0), (8, 0)]
