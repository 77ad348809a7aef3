"""Plans of tensor parallelism, applied in a group that sends nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from hpctrain.config.mesh import MeshShape
from hpctrain.errors import ConfigError, TaskError
from hpctrain.parallel.fsdp import shard_placement_fn
from hpctrain.parallel.mesh import Mesh
from hpctrain.parallel.tensor_parallel import FusedColumnwise, divide, find_plan, second_dimension_is_cut


@pytest.fixture
def mesh():
    """Of two ranks, seen from the second one."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    torch.distributed.destroy_process_group()


def on_meta(*layers):
    return nn.Sequential(*layers).to("meta")


class Planned(nn.Linear):
    def tensor_parallel_plan(self):
        return {"model": ColwiseParallel()}


class Task:
    def __init__(self, plan=None):
        self.plan = plan

    def tensor_parallel_plan(self):
        return self.plan


def test_the_plan_of_the_task_goes_before_that_of_the_model():
    plan = {"task": RowwiseParallel()}
    assert find_plan(Planned(2, 2), Task(plan), 2) is plan
    assert list(find_plan(Planned(2, 2), Task(), 2)) == ["model"]


def test_a_model_without_a_plan_and_a_plan_that_is_none_are_errors():
    with pytest.raises(ConfigError, match=r"parallel.tensor_degree=2: neither Linear nor Task has a plan"):
        find_plan(nn.Linear(2, 2), Task(), 2)
    with pytest.raises(TaskError, match=r"Task.tensor_parallel_plan must return a dict"):
        find_plan(nn.Linear(2, 2), Task({"0": "columns"}), 2)


def test_a_plan_divides_what_it_names(mesh):
    model = on_meta(nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 4))
    model[0].weight.requires_grad = False
    divide(model, {"0": ColwiseParallel(), "1": RowwiseParallel()}, mesh)
    placements = [layer.weight.placements[0] for layer in model[:2]]
    assert placements == [Shard(0), Shard(1)]
    assert not isinstance(model[2].weight, DTensor)
    assert [layer.weight.requires_grad for layer in model] == [False, True, True]


def test_a_name_that_matches_nothing_is_an_error(mesh):
    with pytest.raises(TaskError, match=r"names layers.\*, but the model has 0"):
        divide(on_meta(nn.Linear(4, 4)), {"layers.*": ColwiseParallel()}, mesh)


def test_weights_that_modules_share_stay_shared(mesh):
    model = on_meta(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    divide(model, {"*": ColwiseParallel()}, mesh)
    assert model[1].weight is model[0].weight


def test_weights_that_a_plan_divides_in_two_ways_are_an_error(mesh):
    model = on_meta(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    with pytest.raises(TaskError, match=r"divides 0.weight and 1.weight in different ways"):
        divide(model, {"0": ColwiseParallel()}, mesh)


def test_each_rank_has_its_heads_of_each_matrix(mesh):
    layer = nn.Linear(4, 12).double()
    expected = nn.functional.linear(torch.ones(4, dtype=torch.float64), layer.weight)
    weight = layer.weight.detach().clone()
    layer.bias = None
    divide(nn.Sequential(layer), {"0": FusedColumnwise(3, heads=2)}, mesh)
    rows = [2, 3, 6, 7, 10, 11]
    assert torch.equal(layer.weight.to_local(), weight[rows])
    assert second_dimension_is_cut(layer.weight)
    given = DTensor.from_local(torch.ones(4, dtype=torch.float64), mesh, [Replicate()], run_check=False)
    torch.testing.assert_close(layer(given), expected[rows])


def test_heads_that_the_ranks_can_not_divide_are_refused(mesh):
    with pytest.raises(ConfigError, match="doesn't divide the 3 attention heads") as refused:
        divide(on_meta(nn.Linear(4, 12)), {"0": FusedColumnwise(3, heads=3)}, mesh)
    assert "parallel.tensor_degree=2" in str(refused.value)
    assert "use one of 1" in str(refused.value)


def test_columns_that_the_shards_can_not_divide_are_refused(mesh):
    layer = on_meta(nn.Linear(4, 12))
    divide(layer, {"0": FusedColumnwise(3, heads=2)}, mesh)
    with pytest.raises(ConfigError, match=r"parallel.shard_degree=3: doesn't divide the 4 columns of 0.weight"):
        shard_placement_fn(layer, Mesh(MeshShape(1, 3, 2), None, None))
    cut = shard_placement_fn(layer, Mesh(MeshShape(1, 2, 2), None, None))
    assert (cut(layer[0].weight), cut(layer[0].bias)) == (Shard(1), None)
