"""A loss over the samples of all ranks has the gradients of one rank with all samples."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_gradients_are_those_of_the_whole_batch(ranks, world_size):
    found, alone = (ranks("gathering_grad:gradients", world_size=size) for size in (world_size, 1))
    for process in (*found, *alone):
        assert process.code == 0, process.output
    assert all(process.result == found[0].result for process in found)
    assert len(alone[0].result) == len(found[0].result)
    assert found[0].result == pytest.approx(alone[0].result, rel=1e-12, abs=1e-14)
