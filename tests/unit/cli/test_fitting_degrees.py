from __future__ import annotations

import pytest

from hpctrain.cli.batch_search import Trial
from hpctrain.cli.fitting_degrees import advice_on_degrees, fitting_degrees, sharded_bytes, with_degrees
from hpctrain.config.compose import Composer
from hpctrain.config.mesh import MeshShape

ACTIVATIONS, MODEL = 100, 800
"""Bytes of a rank that don't depend on the degree, and of the whole model."""


def trial(shape: MeshShape, limit: int) -> Trial:
    peak = ACTIVATIONS + MODEL // shape.shard
    return Trial(micro_batch_size=2, fits=peak <= limit, peak_bytes=peak)


def found(shape: MeshShape, limit: int, *, careful: bool):
    """The shard degrees, and of each the peak, whether it fits, and whether it was tried."""
    tried: list[int] = []

    def run(other: MeshShape) -> Trial:
        tried.append(other.shard)
        return trial(other, limit)

    known = trial(shape, limit)
    degrees = list(fitting_degrees(shape, known, MODEL // shape.shard, limit, run, careful=careful))
    assert all(one.shape.num_ranks == shape.num_ranks for one in degrees)
    rows = [(one.shape.shard, one.trial.peak_bytes, one.trial.fits) for one in degrees]
    return rows, tried, advice_on_degrees(shape, degrees)


def test_the_smallest_degree_that_fits_is_found():
    rows, tried, advice = found(MeshShape(1, 8), 300, careful=False)
    assert rows == [(8, 200, True), (4, 300, True), (2, 500, False)]
    assert tried == [4, 2], "not again that of the run, and none below one that doesn't fit"
    assert advice == (
        "smallest shard degree that fits, with micro-batches of 2: parallel=mesh parallel.shard_degree=4 "
        "parallel.replicate_degree=2"
    )


def test_on_a_cpu_nothing_is_tried_that_is_predicted_not_to_fit():
    rows, tried, _ = found(MeshShape(1, 8), 300, careful=True)
    assert rows == [(8, 200, True), (4, 300, True), (2, 500, False)]
    assert tried == [4]


def test_a_larger_degree_fits_where_that_of_the_run_does_not():
    rows, tried, advice = found(MeshShape(6, 2), 300, careful=False)
    assert rows == [(12, 166, True), (6, 233, True), (4, 300, True), (3, 366, False), (2, 500, False), (1, 900, False)]
    assert tried == [12, 6, 4, 3, 1]
    assert advice == (
        "not even one sample fits with parallel.shard_degree=2, but it does with parallel=mesh "
        "parallel.shard_degree=4 parallel.replicate_degree=3"
    )


def test_ranks_that_compute_layers_together_stay_together():
    rows, tried, advice = found(MeshShape(1, 4, 2), 300, careful=False)
    assert rows == [(4, 300, True), (2, 500, False)]
    assert tried == [2]
    _, tried, advice = found(MeshShape(4, 1, 2), 300, careful=False)
    assert tried == [4, 2]
    assert advice.endswith("parallel.shard_degree=4 parallel.replicate_degree=1 parallel.tensor_degree=2")


def test_degrees_that_cannot_divide_the_model_are_left_out():
    shape, known = MeshShape(1, 4), trial(MeshShape(1, 4), 1000)
    tried = fitting_degrees(
        shape, known, 0, 1000, lambda other: None if other.shard == 2 else trial(other, 1000), careful=False
    )
    assert [one.shape.shard for one in tried] == [4, 1]


@pytest.mark.parametrize(
    ("limit", "advice"),
    [
        (200, "parallel.shard_degree=8, which the run already uses, is the smallest that fits"),
        (
            150,
            (
                "not even one sample fits with any shard degree of 8 ranks: use more ranks, "
                "trainer.activation_checkpointing, precision=bf16, or a smaller model"
            ),
        ),
    ],
)
def test_what_is_advised(limit, advice):
    assert found(MeshShape(1, 8), limit, careful=False)[2] == advice


def test_gradients_that_are_kept_whole_are_not_in_shards():
    sizes = {"weights": 40, "gradients": 300, "optimizer": None, "average": 2}
    tried = Trial(micro_batch_size=1, fits=True, peak_bytes=1000, model_bytes=sizes)
    config = Composer().compose(["parallel=fsdp"], world_size=8)
    assert sharded_bytes(config, tried) == 342
    config.parallel.keep_gradients_whole = True
    assert sharded_bytes(config, tried) == 42


def test_a_trial_gets_all_degrees():
    config = Composer().compose(["parallel=fsdp"], world_size=8)
    parallel = with_degrees(config, MeshShape(2, 4, 3)).parallel
    assert (parallel.replicate_degree, parallel.shard_degree, parallel.tensor_degree) == (2, 4, 3)
