from __future__ import annotations

import random

import numpy as np
import torch

from hpctrain.data.draws import lent_generators, seed_generators


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_the_process_goes_on_as_if_nothing_had_been_drawn() -> None:
    seed_generators(1)
    draw()
    straight = [draw() for _ in range(3)]
    seed_generators(1)
    draw()
    interrupted = []
    for key in range(3):
        with lent_generators():
            seed_generators(key)
            draw()
        interrupted.append(draw())
    assert interrupted == straight


def test_the_streams_come_back_after_an_error_too() -> None:
    seed_generators(2)
    expected = draw()
    seed_generators(2)
    try:
        with lent_generators():
            draw()
            raise KeyError
    except KeyError:
        pass
    assert draw() == expected


def test_equal_bits_give_equal_draws_and_others_do_not() -> None:
    with lent_generators():
        seed_generators(2**64 - 1)
        first = draw()
        seed_generators(2**64 - 2)
        second = draw()
        seed_generators(2**64 - 1)
        assert draw() == first
    assert all(one != other for one, other in zip(first, second, strict=True))
