"""What is drawn for a key, from an override in Hydra's grammar."""

from __future__ import annotations

import pytest

from hpctrain.config.compose import Composer
from hpctrain.errors import ConfigError
from hpctrain.search.distribution import Choice, Floats, Integers, distribution_of


@pytest.fixture(scope="module")
def composer():
    return Composer()


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("optimizer=adamw,sgd", Choice(("adamw", "sgd"))),
        ("seed=1,2,1", Choice(("1", "2"))),
        ("model.width=choice(8, 16)", Choice(("8", "16"))),
        ("optimizer.betas=[0.9,0.99],[0.8,0.9]", Choice(("[0.9,0.99]", "[0.8,0.9]"))),
        ("trainer.max_epochs=null,3", Choice(("null", "3"))),
        ("name='a,b',c", Choice(("'a,b'", "c"))),
        ("seed=shuffle(3,1,2)", Choice(("3", "1", "2"))),
        ("seed=sort(3,1,2)", Choice(("1", "2", "3"))),
        ("cluster=glob(*)", Choice(("local", "slurm"))),
        ("seed=range(0,10)", Integers(0, 9)),
        ("seed=range(10,0,-3)", Integers(1, 10, step=3)),
        ("seed=shuffle(range(3))", Integers(0, 2)),
        ("x=range(0,1,0.25)", Floats(0.0, 0.75, step=0.25)),
        ("x=range(1,0,-0.5)", Floats(0.5, 1.0, step=0.5)),
        ("x=interval(1,10)", Integers(1, 10)),
        ("x=interval(start=1, end=10)", Integers(1, 10)),
        ("x=interval(1,10.0)", Floats(1.0, 10.0)),
        ("x=float(interval(1,10))", Floats(1.0, 10.0)),
        ("x=int(interval(1.5,10.5))", Integers(1, 10)),
        ("x=tag(log,interval(1e-5,1e-1))", Floats(1e-5, 0.1, log=True)),
        ("x=tag(log,int(interval(1,1024)))", Integers(1, 1024, log=True)),
        ("x=interval(-1,-1e-3)", Floats(-1.0, -0.001)),
    ],
)
def test_an_override_is_a_distribution(composer, typed, expected):
    (override,) = composer.parse([typed])
    assert distribution_of(override) == expected


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("x=interval(2,1)", r"x=interval\(2,1\): has a LOW that is not below HIGH"),
        ("x=interval(1.0,1.0)", "has a LOW that is not below"),
        ("x=interval(0,inf)", "an end that is not finite"),
        ("x=interval(nan,1)", "an end that is not finite"),
        ("x=tag(log,interval(0,1))", "no logarithm at LOW=0; choose LOW above 0"),
        ("x=tag(logarithmic,interval(1,2))", "the unknown tag logarithmic"),
        ("x=tag(log,choice(1,2))", "has a tag, which only an interval may have"),
        ("x=range(3,3)", "has no values"),
        ("x=range(0,1,0)", "is not a range"),
        ("cluster=glob(nothing*)", "has no values"),
    ],
)
def test_what_a_search_cannot_use_is_one_line(composer, typed, message):
    (override,) = composer.parse([typed])
    with pytest.raises(ConfigError, match=message):
        distribution_of(override)


@pytest.mark.parametrize(
    "distribution",
    [
        Choice(("a", "b", "c")),
        Integers(-3, 3),
        Integers(1, 1000, log=True),
        Integers(1, 10, step=3),
        Floats(1e-5, 1e-1, log=True),
        Floats(1.0000001, 1.0000002),
        Floats(-1e308, 1e308),
        Floats(0.0, 0.75, step=0.25),
    ],
    ids=str,
)
def test_values_lie_inside_are_short_and_exact(distribution):
    fractions = [0.0, 1e-9, *(number / 997 for number in range(997)), 1 - 2**-53]
    values = [distribution.at(fraction) for fraction in fractions]
    if isinstance(distribution, Choice):
        assert set(values) == set(distribution.values)
        return
    read = [float(value) for value in values]
    assert min(read) >= distribution.low
    assert max(read) <= distribution.high
    assert read == sorted(read)
    if distribution.size is not None:
        assert set(values) <= set(distribution.all())
        assert len(distribution.all()) == distribution.size
        assert (values[0], values[-1]) == (distribution.all()[0], distribution.all()[-1])
    else:
        assert max(read) < distribution.high
        assert values == [repr(number) for number in read]


def test_the_digits_are_few():
    assert [Floats(1e-5, 1e-1, log=True).at(number / 4) for number in range(4)] == [
        "1e-05",
        "0.0001",
        "0.001",
        "0.01",
    ]
    assert Floats(0.0, 1.0).at(1 / 3) == "0.333333"
