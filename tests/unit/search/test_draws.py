"""Draws depend on the seed, the key and the number alone, and repeat nothing."""

from __future__ import annotations

import pytest

from hpctrain.search.distribution import Choice, Floats, Integers, draws, fraction, size_of

SMALL = {"a": Choice(("x", "y", "z")), "b": Integers(1, 4)}
LARGE = {"lr": Floats(1e-5, 1e-1, log=True), "width": Integers(8, 512, log=True), "optimizer": Choice(("adamw", "sgd"))}


def test_the_fractions_are_those_of_the_documented_hash():
    assert [fraction(0, "optimizer.lr", number) for number in range(3)] == [
        0.2828213170986722,
        0.2547933624710246,
        0.7402875687597088,
    ]
    many = [fraction(3, "x", number) for number in range(4000)]
    assert all(0 <= one < 1 for one in many)
    assert [sum(low <= 10 * one < low + 1 for one in many) for low in range(10)] == pytest.approx([400] * 10, abs=80)


def test_more_runs_keep_the_first_ones():
    for space in (SMALL, LARGE):
        many = draws(space, 0, 12)
        for number in range(13):
            assert draws(space, 0, number) == many[:number]


def test_a_draw_depends_on_its_own_key_alone():
    alone = draws({"lr": LARGE["lr"]}, 5, 10)
    assert [dict(values)["lr"] for values in draws(LARGE, 5, 10)] == [dict(values)["lr"] for values in alone]
    assert draws(LARGE, 6, 10) != draws(LARGE, 5, 10)
    assert [dict(one)["x"] for one in draws({"+x": SMALL["b"]} | {}, 0, 0)] == []


def test_a_finite_space_has_each_of_its_elements_once():
    assert size_of(SMALL) == 12
    assert size_of(LARGE) is None
    found = draws(SMALL, 0, 100)
    assert len(found) == len(set(found)) == 12
    assert len({dict(values)["a"] for values in found[:6]}) > 1


def test_an_unlikely_element_is_found_at_last():
    found = draws({"x": Integers(1, 300, log=True)}, 0, 1000)
    assert sorted(int(values[0][1]) for values in found) == list(range(1, 301))


def test_runs_that_exist_are_not_drawn_again():
    first = draws(SMALL, 0, 5)
    others = draws(SMALL, 0, 100, existing=first, first=5)
    assert len(others) == 7
    assert not set(first) & set(others)
