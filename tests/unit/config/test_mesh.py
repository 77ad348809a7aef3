import pytest

from hpctrain.config.mesh import MeshShape, mesh_shape
from hpctrain.config.parallel import Parallel
from hpctrain.errors import ConfigError


def mesh(world_size, local_world_size=1, **degrees):
    return mesh_shape(Parallel(kind="mesh", **degrees), world_size, local_world_size)


def test_ddp_has_no_mesh():
    assert mesh_shape(Parallel(), 4, 4) is None


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [
        ({}, MeshShape(1, 8)),
        ({"replicate_degree": 2}, MeshShape(2, 4)),
        ({"replicate_degree": -1, "shard_degree": 2}, MeshShape(4, 2)),
        ({"replicate_degree": -1, "shard_degree": None}, MeshShape(2, 4)),
        ({"replicate_degree": 8, "shard_degree": 1}, MeshShape(8, 1)),
    ],
)
def test_a_degree_of_minus_one_is_what_the_other_leaves(degrees, expected):
    found = mesh(8, 4, **degrees)
    assert found == expected
    assert found.data_parallel_size == 8


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [
        ({"shard_degree": 1, "tensor_degree": -1}, MeshShape(1, 1, 8)),
        ({"tensor_degree": None}, MeshShape(1, 1, 8)),
        ({"tensor_degree": 2}, MeshShape(1, 4, 2)),
        ({"replicate_degree": -1, "shard_degree": None, "tensor_degree": 4}, MeshShape(1, 2, 4)),
        ({"replicate_degree": 2, "shard_degree": 2, "tensor_degree": -1}, MeshShape(2, 2, 2)),
    ],
)
def test_ranks_that_compute_layers_together_share_samples(degrees, expected):
    found = mesh(8, 8, **degrees)
    assert found == expected
    assert found.data_parallel_size * found.tensor == 8


def test_ranks_that_compute_layers_together_are_on_one_node():
    with pytest.raises(ConfigError, match="doesn't divide the 2 ranks of a node"):
        mesh(8, 2, tensor_degree=4)
    assert mesh(8, 2, tensor_degree=None) == MeshShape(1, 4, 2)
    assert MeshShape(1, 2, 2).picture(["n1", "n1", "n2", "n2"]) == ["replica 0: ranks 0-1 on n1, 2-3 on n2"]


def test_degrees_that_do_not_divide_the_ranks_are_refused_with_those_that_do():
    with pytest.raises(ConfigError, match="doesn't divide 8 ranks") as refused:
        mesh(8, replicate_degree=3)
    assert "parallel.replicate_degree=3" in str(refused.value)
    assert "use one of 1, 2, 4, 8" in str(refused.value)


def test_a_product_that_is_not_the_number_of_ranks_is_refused():
    with pytest.raises(ConfigError, match="needs 4 ranks, but there are 8") as refused:
        mesh(8, replicate_degree=2, shard_degree=2)
    assert "-1" in str(refused.value)


def test_two_open_degrees_are_refused():
    with pytest.raises(ConfigError, match="only one degree may be -1"):
        Parallel(kind="mesh", replicate_degree=-1, shard_degree=-1)


@pytest.mark.parametrize(
    ("kind", "options", "key"),
    [
        ("ddp", {"shard_degree": 2}, "parallel.shard_degree"),
        ("ddp", {"blocks": ["layers.*"]}, "parallel.blocks"),
        ("data_parallel", {"keep_gradients_whole": True}, "parallel.keep_gradients_whole"),
        ("mesh", {"find_unused_parameters": True}, "parallel.find_unused_parameters"),
        ("mesh", {"gradient_compression": "fp16"}, "parallel.gradient_compression"),
    ],
)
def test_keys_of_another_kind_are_refused(kind, options, key):
    with pytest.raises(ConfigError, match="has no effect") as refused:
        Parallel(kind=kind, **options)
    assert key in str(refused.value)


def test_the_picture_shows_the_ranks_of_each_replica_by_node():
    assert MeshShape(2, 4).picture(["n1"] * 4 + ["n2"] * 4) == [
        "replica 0: ranks 0-3 on n1",
        "replica 1: ranks 4-7 on n2",
    ]
    assert MeshShape(1, 4).picture(["n1", "n1", "n2", "n2"]) == ["replica 0: ranks 0-1 on n1, 2-3 on n2"]
    assert MeshShape(3, 1).picture(["n1", "n1", "n2"])[2] == "replica 2: rank 2 on n2"
