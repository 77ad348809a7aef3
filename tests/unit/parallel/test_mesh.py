from __future__ import annotations

import pytest
import torch

from hpctrain.config.mesh import MeshShape
from hpctrain.parallel.mesh import DataShare, Mesh, TrainingWorld

CPU = torch.device("cpu")


def test_ranks_that_compute_layers_together_have_one_share_of_the_samples():
    mesh = Mesh(MeshShape(1, 2, 2), None, None)
    worlds = [TrainingWorld(rank=rank, size=4, local_rank=rank, devices=(CPU,), mesh=mesh) for rank in range(4)]
    assert [(world.share.number, world.share.count, world.share.is_counted) for world in worlds] == [
        (0, 2, True),
        (0, 2, False),
        (1, 2, True),
        (1, 2, False),
    ]
    alone = TrainingWorld(rank=3, size=4, local_rank=3, devices=(CPU,)).share
    assert (alone.number, alone.count, alone.is_counted) == (3, 4, True)


def test_ranks_with_other_layers_have_the_same_samples_and_draw_other_numbers():
    shares = [DataShare.of(rank, 4, MeshShape(1, 2, pipeline=2)) for rank in range(4)]
    assert [share.number for share in shares] == [0, 1, 0, 1]
    assert [share.is_counted for share in shares] == [True, True, False, False]
    assert [share.random_stream for share in shares] == [0, 1, 2, 3]
    assert [share.leads for share in shares] == [True, False, True, False]


@pytest.mark.parametrize(
    ("shape", "degrees"),
    [
        (None, {}),
        (MeshShape(1, 4), {}),
        (MeshShape(1, 2, 2), {"tensor_degree": 2}),
        (MeshShape(1, 1, 2, 2), {"tensor_degree": 2, "pipeline_degree": 2}),
    ],
)
def test_degrees_of_checkpoints(shape, degrees):
    share = DataShare.of(0, 4, shape)
    assert share.degrees == degrees
    assert share.has_saved_degrees(degrees)
    assert not share.has_saved_degrees({**degrees, "tensor_degree": 4})
