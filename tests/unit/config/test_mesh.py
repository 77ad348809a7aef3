import pytest

from hpctrain.config.mesh import MeshShape, keeps_gradients_whole, mesh_shape
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


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [
        ({"shard_degree": 1, "pipeline_degree": -1}, MeshShape(1, 1, 1, 8)),
        ({"pipeline_degree": 2}, MeshShape(1, 4, 1, 2)),
        ({"replicate_degree": -1, "shard_degree": None, "pipeline_degree": 2}, MeshShape(1, 4, 1, 2)),
        ({"replicate_degree": 2, "shard_degree": 1, "pipeline_degree": -1}, MeshShape(2, 1, 1, 4)),
        ({"shard_degree": None, "tensor_degree": 2, "pipeline_degree": -1}, MeshShape(1, 2, 2, 2)),
        ({"shard_degree": 1, "tensor_degree": None, "pipeline_degree": -1}, MeshShape(1, 1, 4, 2)),
        ({"shard_degree": 1, "tensor_degree": -1, "pipeline_degree": 4}, MeshShape(1, 1, 2, 4)),
    ],
)
def test_ranks_of_all_stages_of_a_replica_share_samples(degrees, expected):
    found = mesh(8, 4, **degrees)
    assert found == expected
    assert found.num_ranks == 8
    assert found.replica_size == 8 // found.replicate
    assert found.ranks_per_stage == 8 // found.pipeline
    assert found.data_parallel_size == 8 // (found.tensor * found.pipeline)


def test_a_pipeline_is_outermost_and_ends_with_rank_zero():
    shape = MeshShape(2, 2, 1, 3)
    assert list(shape.degrees.items()) == [("pipeline", 3), ("replicate", 2), ("shard", 2)]
    assert list(MeshShape(1, 1, 2, 2).degrees) == ["pipeline", "replicate", "shard", "tensor"]
    assert list(MeshShape(1, 1).degrees) == ["replicate", "shard"]
    assert [shape.position(rank) for rank in range(12)] == [2] * 4 + [1] * 4 + [0] * 4
    assert [MeshShape(1, 2).position(rank) for rank in range(2)] == [0, 0]


def test_ranks_that_compute_layers_together_are_on_one_node_of_a_pipeline():
    with pytest.raises(ConfigError, match="doesn't divide the 2 ranks of a node"):
        mesh(8, 2, shard_degree=1, tensor_degree=4, pipeline_degree=2)


def test_degrees_that_do_not_divide_the_ranks_are_refused_with_those_that_do():
    with pytest.raises(ConfigError, match="doesn't divide 8 ranks") as refused:
        mesh(8, replicate_degree=3)
    assert "parallel.replicate_degree=3" in str(refused.value)
    assert "use one of 1, 2, 4, 8" in str(refused.value)


def test_a_product_that_is_not_the_number_of_ranks_is_refused():
    with pytest.raises(ConfigError, match="needs 4 ranks, but there are 8") as refused:
        mesh(8, replicate_degree=2, shard_degree=2)
    assert "-1" in str(refused.value)


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        (
            {"pipeline_degree": 3},
            "parallel.pipeline_degree=3: doesn't divide 8 ranks; use one of 1, 2, 4, 8",
        ),
        (
            {"shard_degree": 2, "pipeline_degree": 2},
            (
                "parallel.shard_degree=2: with parallel.replicate_degree=1 and parallel.pipeline_degree=2 needs 4 "
                "ranks, but there are 8; set one of them to -1: what the others leave"
            ),
        ),
        (
            {"shard_degree": 2, "tensor_degree": 2, "pipeline_degree": 4},
            (
                "parallel.shard_degree=2: with parallel.replicate_degree=1, parallel.tensor_degree=2 and "
                "parallel.pipeline_degree=4 needs 16 ranks, but there are 8; set one of them to -1: what the others "
                "leave"
            ),
        ),
        (
            {"replicate_degree": 2, "tensor_degree": 2, "pipeline_degree": 4},
            (
                "parallel.replicate_degree=2: with parallel.tensor_degree=2 and parallel.pipeline_degree=4 needs 16 "
                "ranks or a multiple, but there are 8; change one of them"
            ),
        ),
        (
            {"shard_degree": 4, "replicate_degree": 4, "pipeline_degree": -1},
            (
                "parallel.shard_degree=4: with parallel.replicate_degree=4 needs 16 ranks or a multiple, but there "
                "are 8; change one of them"
            ),
        ),
    ],
)
def test_the_degrees_of_a_pipeline_have_to_fit_the_ranks(degrees, message):
    with pytest.raises(ConfigError) as refused:
        mesh(8, 4, **degrees)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("degrees", "key", "other"),
    [
        ({"replicate_degree": -1, "shard_degree": -1}, "shard", "replicate"),
        ({"replicate_degree": -1, "shard_degree": 1, "tensor_degree": -1}, "tensor", "replicate"),
        ({"tensor_degree": -1}, "tensor", "shard"),
        ({"pipeline_degree": -1}, "pipeline", "shard"),
        ({"shard_degree": 1, "tensor_degree": -1, "pipeline_degree": -1}, "pipeline", "tensor"),
    ],
)
def test_two_open_degrees_are_refused(degrees, key, other):
    with pytest.raises(ConfigError, match="only one degree may be -1") as refused:
        Parallel(kind="mesh", **degrees)
    assert f"parallel.{key}_degree=-1" in str(refused.value)
    assert f"set parallel.{other}_degree=1, or this one to a number of ranks" in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "options", "key"),
    [
        ("ddp", {"shard_degree": 2}, "parallel.shard_degree"),
        ("ddp", {"blocks": ["layers.*"]}, "parallel.blocks"),
        ("ddp", {"pipeline_degree": -1}, "parallel.pipeline_degree"),
        ("ddp", {"stages_per_rank": 2}, "parallel.stages_per_rank"),
        ("ddp", {"stages": ["layers.2"]}, "parallel.stages"),
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


def test_the_picture_of_a_pipeline_begins_with_its_first_stage():
    assert MeshShape(1, 4, 1, 2).picture(["n1"] * 4 + ["n2"] * 4) == [
        "replica 0, stage 0: ranks 4-7 on n2",
        "replica 0, stage 1: ranks 0-3 on n1",
    ]
    assert MeshShape(2, 1, 1, 2).picture(["n1", "n1", "n2", "n2"]) == [
        "replica 0, stage 0: rank 2 on n2",
        "replica 0, stage 1: rank 0 on n1",
        "replica 1, stage 0: rank 3 on n2",
        "replica 1, stage 1: rank 1 on n1",
    ]
    assert MeshShape(1, 1, 2, 2).picture(["n1"] * 4, stages_per_rank=3) == [
        "replica 0, stages 0, 2 and 4: ranks 2-3 on n1",
        "replica 0, stages 1, 3 and 5: ranks 0-1 on n1",
    ]


@pytest.mark.parametrize(
    ("options", "shard", "expected"),
    [
        ({}, 2, False),
        ({"keep_gradients_whole": True}, 2, True),
        ({}, 1, True),
        ({"cpu_offload": True}, 1, False),
        ({"cpu_offload": True, "keep_gradients_whole": True}, 1, True),
    ],
)
def test_gradients_are_reduced_once_per_step_where_that_takes_no_more_memory(options, shard, expected):
    assert keeps_gradients_whole(Parallel(kind="mesh", **options), MeshShape(2, shard)) == expected
