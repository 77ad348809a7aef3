from __future__ import annotations

import dataclasses

import torch

from hpctrain.config.mesh import MeshShape
from hpctrain.parallel.mesh import Mesh
from hpctrain.train.task_log import build_meter


def test_of_ranks_that_compute_layers_together_one_counts(lone_world):
    mesh = Mesh(MeshShape(1, 1, 2), None, None)
    for rank, counted in ((0, 8.0), (1, 0.0)):
        meter = build_meter(dataclasses.replace(lone_world, rank=rank, mesh=mesh), "loss")
        meter.add_mean("loss", torch.tensor(2.0), 2)
        meter.add_sum("loss", torch.tensor(1.0), 3)
        meter.add_value("loss", 1.0, 3)
        assert meter.own_state() == {"loss": (counted, counted)}
