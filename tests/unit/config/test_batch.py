from __future__ import annotations

import pytest

from hpctrain.config.compose import Composer
from hpctrain.config.resources import check_batch, check_divisible, micro_batch_size_of
from hpctrain.errors import ConfigError


@pytest.fixture(scope="module")
def composer():
    return Composer()


@pytest.mark.parametrize(
    ("global_batch_size", "micro_batch_size", "world_size", "message"),
    [
        (64, None, 4, None),
        (64, 8, 4, None),
        (64, None, 3, "cannot be divided among 3 ranks; set it to 63 or 66, or run 1, 2, 4, 8 or 16 processes"),
        (64, 24, 2, "cannot be divided among 2 ranks with micro-batches of 24; set it to 48 or 96"),
        (2, None, 3, "cannot be divided among 3 ranks; set it to 3, or run 1 or 2 processes"),
        (1, None, 2, "cannot be divided among 2 ranks; set it to 2, or run 1 process"),
        (3, 2, 1, "cannot be divided among 1 rank with micro-batches of 2; set it to 2 or 4"),
        (3, 2, 2, "cannot be divided among 2 ranks with micro-batches of 2; set it to 4"),
    ],
)
def test_the_ranks_divide_the_global_batch(global_batch_size, micro_batch_size, world_size, message):
    if message is None:
        check_divisible(global_batch_size, micro_batch_size, world_size)
        return
    with pytest.raises(ConfigError) as caught:
        check_divisible(global_batch_size, micro_batch_size, world_size)
    assert str(caught.value) == f"trainer.global_batch_size={global_batch_size}: {message}"


@pytest.mark.parametrize(
    ("micro_batch_size", "num_groups", "problem", "remedy"),
    [
        (None, 3, "3 groups of 2 ranks that share samples", "63 or 66, or run 2, 4, 8, 16 or 32 processes"),
        (24, 2, "2 groups of 2 ranks that share samples, with micro-batches of 24", "48 or 96"),
    ],
)
def test_groups_of_ranks_divide_the_global_batch(micro_batch_size, num_groups, problem, remedy):
    check_divisible(64, 8, 4, 2)
    with pytest.raises(ConfigError) as caught:
        check_divisible(64, micro_batch_size, num_groups, 2)
    assert str(caught.value) == f"trainer.global_batch_size=64: cannot be divided among {problem}; set it to {remedy}"


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_cuda_graphs_do_not_accumulate(composer, mode):
    compiled = ["trainer.compile=true", f"trainer.compile_mode={mode}", "trainer.micro_batch_size=16"]
    config = composer.compose(["cluster=slurm", "nodes=4", *compiled])
    check_batch(config, 4)
    if mode == "default":
        check_batch(config, 2)
        return
    # ranks that torchrun started, fewer than the configuration asks for
    with pytest.raises(ConfigError) as caught:
        check_batch(config, 2)
    assert str(caught.value) == (
        f"trainer.compile_mode={mode}: uses CUDA graphs, which overwrite the gradients of earlier micro-batches, and a "
        "step has 2 micro-batches; set trainer.micro_batch_size=32, a rank's whole share of a step, or "
        "trainer.compile_mode=default"
    )
    composer.compose(["cluster=slurm", "nodes=2", *compiled[:2]])


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        ([], {4: 12, 3: 16, 2: 24}),
        (["cluster.min_nodes=2"], {4: 12, 3: 8, 2: 12, 1: 12}),
        (["cluster.min_nodes=2", "trainer.micro_batch_size=6"], {4: 6, 2: 6}),
    ],
)
def test_a_larger_share_is_cut_into_pieces_that_fit_where_nodes_may_be_missing(composer, words, sizes):
    config = composer.compose(["cluster=slurm", "nodes=4", "trainer.global_batch_size=48", *words])
    assert {num_ranks: micro_batch_size_of(config, num_ranks) for num_ranks in sizes} == sizes


@pytest.mark.parametrize(
    ("share", "pipeline_degree", "size"),
    [
        (64, 1, 64),
        (64, 2, 8),
        (64, 4, 4),
        (64, 16, 1),
        # fewer samples than four for each place
        (6, 2, 1),
        # 8 doesn't divide it; 9 does
        (36, 2, 4),
        (31, 2, 1),
        (1, 2, 1),
    ],
)
def test_a_pipeline_has_at_least_four_micro_batches_for_each_place(composer, share, pipeline_degree, size):
    config = composer.compose(["cluster=slurm", "nodes=2", f"trainer.global_batch_size={share * 2}"])
    assert micro_batch_size_of(config, 2, pipeline_degree) == size
    config = composer.compose(["cluster=slurm", "nodes=2", "trainer.micro_batch_size=16"])
    assert micro_batch_size_of(config, 2, pipeline_degree) == 16


@pytest.mark.parametrize(
    ("degrees", "shares", "pipeline_degree", "size"),
    [
        # on all eight nodes, four pipelines of two cut their shares of 64 into pieces of 8
        (("pipeline_degree=2", "shard_degree=-1"), 4, 2, 8),
        (("pipeline_degree=2", "shard_degree=-1"), 2, 2, 8),
        (("pipeline_degree=2", "shard_degree=-1"), 1, 2, 8),
        # on all eight nodes, a pipeline of eight cuts its share of 256 into pieces of 8
        (("pipeline_degree=-1", "shard_degree=1"), 1, 8, 8),
        (("pipeline_degree=-1", "shard_degree=1"), 1, 2, 8),
    ],
)
def test_micro_batches_of_a_pipeline_fit_on_fewer_nodes(composer, degrees, shares, pipeline_degree, size):
    words = ["cluster=slurm", "nodes=8", "cluster.min_nodes=2", "trainer.global_batch_size=256", "parallel=mesh"]
    config = composer.compose([*words, *(f"parallel.{degree}" for degree in degrees)])
    assert micro_batch_size_of(config, shares, pipeline_degree) == size
