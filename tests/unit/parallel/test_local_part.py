from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from hpctrain.parallel.local_part import is_dtensor, local_part, local_parts, whole
from hpctrain.parallel.sharded_tensor import local_pieces, pieces_like, placed_like, replicas
from hpctrain.run.checkpoint_manifest import Region


def test_a_tensor_of_this_rank_alone_is_its_own_part():
    tensor = torch.arange(6.0).reshape(2, 3)
    assert not is_dtensor(tensor)
    assert local_part(tensor) is whole(tensor) is tensor
    assert local_parts([tensor]) == [tensor]
    (piece,) = local_pieces(tensor)
    assert piece == pieces_like(tensor, (2, 3))[0]
    assert piece.region == piece.place == Region((0, 0), (2, 3))
    assert placed_like(tensor, tensor, (2, 3)) is tensor
    assert replicas(tensor, 3) == (0, 1, 2)


@pytest.fixture
def mesh():
    """Of one rank, in a group of its own."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_a_shard_shares_its_memory_and_what_belongs_to_it_is_placed_alike(mesh):
    whole_one = torch.arange(12.0).reshape(4, 3)
    tensor = distribute_tensor(whole_one, mesh, [Shard(0)])
    assert is_dtensor(tensor)
    local_part(tensor)[0, 0] = 5.0
    assert whole(tensor)[0, 0] == 5.0
    factor = placed_like(torch.ones(4, 1), tensor, (4, 1))
    assert isinstance(factor, DTensor)
    assert factor.placements == (Shard(0),)
    other = placed_like(torch.ones(1, 3), tensor, (1, 3))
    assert isinstance(other, DTensor)
    assert other.placements[0].is_replicate(), "a dimension of another size isn't cut"


def test_a_rank_that_shares_no_model_does_not_import_dtensor():
    """It takes half a second, at every start and requeue."""
    modules = "hpctrain.train.attempt, hpctrain.train.stored_model"
    program = f"import sys, {modules}; print('torch.distributed.tensor' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
