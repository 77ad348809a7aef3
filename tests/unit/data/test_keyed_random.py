from __future__ import annotations

import random

import numpy as np
import torch

from hpctrain.data.keyed_random import keyed_bits, lent_generators, seed_generators


def test_the_finalizer_is_splitmix64() -> None:
    # The first output of SplitMix64 seeded with 0, and with 1234567 (Vigna's reference implementation).
    assert keyed_bits(0).tolist() == [0xE220A8397B1DCDAF]
    assert keyed_bits(1234567).tolist() == [6457827717110365317]


def test_parts_broadcast_and_keep_their_places() -> None:
    table = keyed_bits(5, np.arange(3)[:, None], np.arange(4))
    assert table.shape == (3, 4)
    assert table[2, 1] == keyed_bits(5, 2, 1)[0] != keyed_bits(5, 1, 2)[0]
    assert np.unique(table).size == 12


def test_one_changed_bit_of_the_key_changes_half_of_the_bits() -> None:
    keys = np.uint64(1) << np.arange(64, dtype=np.uint64)
    flipped = keyed_bits(7, keys) ^ keyed_bits(7, 0)
    ones = np.unpackbits(flipped.view(np.uint8)).mean()
    assert abs(ones - 0.5) < 4 * 0.5 / np.sqrt(64 * 64)


def test_seeds_are_taken_modulo_two_to_the_64() -> None:
    assert keyed_bits(-1).tolist() == keyed_bits(2**64 - 1).tolist()


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_the_generators_continue_as_if_nothing_had_been_drawn() -> None:
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


def test_the_generators_are_restored_after_an_error_too() -> None:
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
