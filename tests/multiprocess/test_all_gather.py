"""A loss over the samples of all ranks has the gradients of one rank with all samples."""

from __future__ import annotations

import pytest


def run(fork_server, meeting, world_size):
    target = "gathering_grad:gradients"
    done = fork_server.wait(*(fork_server.start(target, rank, world_size, str(meeting)) for rank in range(world_size)))
    assert {process.code for process in done} == {0}, "\n".join(process.output for process in done)
    return [process.result for process in done]


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_gradients_are_those_of_the_whole_batch(fork_server, tmp_path, world_size):
    found = run(fork_server, tmp_path / "meeting", world_size)
    assert all(gradients == found[0] for gradients in found)
    (expected,) = run(fork_server, tmp_path / "alone", 1)
    assert len(expected) == len(found[0])
    assert found[0] == pytest.approx(expected, rel=1e-12, abs=1e-14)
