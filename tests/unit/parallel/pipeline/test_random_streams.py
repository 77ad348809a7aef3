"""The random numbers of a rank in a pipeline."""

from __future__ import annotations

import random

import numpy as np
import torch

from hpctrain.parallel.pipeline.random_streams import RandomStreams


def drawn() -> tuple[float, float, float]:
    return torch.rand(()).item(), float(np.random.rand()), random.random()


def seeded(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def test_the_task_draws_the_same_in_all_stages() -> None:
    found = []
    for stage in range(2):
        seeded(stage)
        streams = RandomStreams(7, ())
        own = []
        for number in (0, 1, -1):
            with streams.of_task(number):
                before = drawn()
                with streams.of_layers():
                    for _ in range(stage):
                        drawn()
                own.append((before, drawn()))
        found.append(own)
    assert found[0] == found[1]
    assert len({numbers for pair in found[0] for numbers in pair}) == 6


def test_layers_go_on_with_their_own_numbers() -> None:
    seeded(3)
    expected = [drawn() for _ in range(3)]
    seeded(3)
    streams = RandomStreams(7, ())
    found = []
    for number in range(2):
        with streams.of_task(number):
            drawn()
            with streams.of_layers():
                found.append(drawn())
            drawn()
    assert [*found, drawn()] == expected
