from __future__ import annotations

import pytest

from hpctrain.config.compose import Composer, ProgramComposer
from hpctrain.config.resources import node_counts, resources_of
from hpctrain.errors import ConfigError

EIGHT = ("cluster=slurm", "nodes=8")
TWO_RANKS_EACH = "cluster.processes_per_node=2"


@pytest.fixture(scope="module")
def composer():
    return Composer()


def counts(composer, *words):
    config = composer.compose_run([*EIGHT, *words])
    return node_counts(config, resources_of(config))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], (8,)),
        (["cluster.min_nodes=8"], (8,)),
        (["cluster.min_nodes=1"], (8, 4, 2, 1)),
        (["cluster.min_nodes=3"], (8, 4)),
        (["cluster.min_nodes=1", "trainer.global_batch_size=48"], (8, 6, 4, 3, 2, 1)),
        (["cluster.min_nodes=1", "trainer.global_batch_size=48", TWO_RANKS_EACH], (8, 6, 4, 3, 2, 1)),
        (["cluster.min_nodes=1", "trainer.global_batch_size=48", "trainer.micro_batch_size=3"], (8, 4, 2, 1)),
        (["cluster.min_nodes=1", "parallel=fsdp"], (8, 4, 2, 1)),
        (["cluster.min_nodes=1", "cluster.gpus_per_node=1", "parallel=fsdp", "parallel.cpu_offload=true"], (8, 4, 2)),
        (["cluster.min_nodes=1", "parallel=mesh", "parallel.replicate_degree=-1", "parallel.shard_degree=4"], (8, 4)),
        (["cluster.min_nodes=1", "parallel=pp"], (8, 7, 6, 5, 4, 3, 2, 1)),
        (["cluster.min_nodes=1", "parallel=fsdp", "parallel.pipeline_degree=2"], (8, 4, 2)),
        (["cluster.min_nodes=1", "parallel=pp", "parallel.stages_per_rank=2"], (8, 7, 6, 5, 4, 3, 2)),
    ],
)
def test_nodes_whose_ranks_divide_the_batch_and_fit_the_mesh(composer, words, expected):
    assert counts(composer, *words) == expected


def test_a_program_copes_with_any_number():
    assert counts(ProgramComposer(["python", "train.py"]), "cluster.min_nodes=5") == (8, 7, 6, 5)


SEVEN = "no number from 5 to 7 works: with 7, trainer.global_batch_size=64 cannot be divided among 7 ranks"
REMEDY = "lower it, change parallel.shard_degree, or leave cluster.min_nodes out"
MESH = "with 7, parallel.shard_degree=8 with parallel.replicate_degree=1 needs 8 ranks, but there are 7"

STAGES = (
    "with 7, parallel.stages=['a', 'b', 'c', 'd', 'e', 'f', 'g'] begins 8 stages, and parallel.pipeline_degree=7 with "
    "parallel.stages_per_rank=1 has 7; lower it, change parallel.stages"
)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cluster.min_nodes=9"], "cluster.min_nodes=9: is more than nodes=8; lower it, or raise nodes"),
        (
            ["cluster.min_nodes=5"],
            f"cluster.min_nodes=5: {SEVEN}; lower it, change trainer.global_batch_size, or leave cluster.min_nodes out",
        ),
        (
            ["cluster.min_nodes=4", "parallel=mesh", "parallel.shard_degree=8"],
            f"cluster.min_nodes=4: no number from 4 to 7 works: {MESH}; {REMEDY}",
        ),
        (
            ["cluster.min_nodes=7", "parallel=mesh", "parallel.shard_degree=8", "trainer.global_batch_size=56"],
            f"cluster.min_nodes=7: the run can't train on 7 nodes: {MESH}; {REMEDY}",
        ),
        (
            ["cluster.min_nodes=7", "parallel=pp", "parallel.stages=[a,b,c,d,e,f,g]"],
            f"cluster.min_nodes=7: the run can't train on 7 nodes: {STAGES}, or leave cluster.min_nodes out",
        ),
    ],
)
def test_fewer_nodes_have_to_be_of_use(composer, words, message):
    with pytest.raises(ConfigError) as caught:
        composer.compose_run([*EIGHT, *words])
    assert str(caught.value) == message
