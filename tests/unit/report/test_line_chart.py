from __future__ import annotations

import itertools
import math

import pytest

from hpctrain.report.line_chart import MOST_CROSSES, Frame, Line, Scale, drawn_line, number_text, scale_of
from hpctrain.report.sweep_charts import KeyAxis


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.5, "0.5"),
        (2500.0, "2500"),
        (20_000.0, "20k"),
        (-1.5e6, "-1.5M"),
        (1e-5, "1e-5"),
        (3.2e-7, "3.2e-7"),
        (1e20, "1e20"),
        (math.nan, "nan"),
    ],
)
def test_numbers_are_short(value, text):
    assert number_text(value) == text


def test_a_line_that_has_diverged_has_few_crosses():
    frame = Frame(Scale(0, 999), Scale(0, 1), [])
    line = Line(label="loss", xs=range(1000), ys=[0.5, *[math.nan] * 998, 0.5])
    assert drawn_line(line, frame).count('class="cross"') == MOST_CROSSES


@pytest.mark.parametrize(
    ("low", "high", "log"),
    [
        (0, 1, False),
        (-3e-9, 5e-9, False),
        (0.93, 0.97, False),
        (-1e300, 1e300, False),
        (1e-300, 1e300, True),
        (1, 2e6, True),
        (0.3, 0.9, True),
        (3, 40, True),
    ],
)
def test_ticks_are_few_and_within_the_scale(low, high, log):
    ticks = Scale(low, high, log).ticks(5)
    assert 1 <= len(ticks) <= 6
    assert all(low <= value * (1 + 1e-9) and value <= high * (1 + 1e-9) for value, _ in ticks if value >= 0)
    assert len({text for _, text in ticks}) == len(ticks)


def test_a_scale_is_logarithmic_over_decades_alone():
    assert scale_of([1, 99]).log is False
    assert scale_of([1, 100]).log is True
    assert scale_of([0, 100]).log is False
    assert scale_of([math.nan, math.inf]) == Scale(0.0, 1.0)


EXTREMES = (0.0, 5e-324, 1e-323, 1e-310, 1e-300, 1e-160, 1.0, 1.0 + 2**-52, 1e160, 1e300, 1.7e308)


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations_with_replacement(EXTREMES, 2)))
def test_a_scale_of_any_values_has_ticks_and_places(first, second):
    for values in ((first, second), (-first, second), (-first, -second), (first, second, math.nan)):
        for log, margin in itertools.product((None, False, True), (0.0, 0.06)):
            scale = scale_of(values, log=log, margin=margin)
            assert scale.low < scale.high
            assert len(scale.ticks(5)) <= 7
            assert all(0 <= scale.place(value) <= 1 for value in values if not math.isnan(value))


def test_places():
    assert Scale(0, 10).place(5) == 0.5
    assert Scale(1, 100, log=True).place(10) == pytest.approx(0.5)
    assert Scale(0, 10).place(-5) == 0.0


def test_the_axis_of_a_key():
    rates = KeyAxis.of("lr", [1e-4, 1e-3, None, 1e-2])
    assert rates.scale.log
    assert rates.number(None) is None
    typed = KeyAxis.of("args.lr", ["1e-4", 1e-3, "0.01"])
    assert (typed.texts, typed.number("1e-4")) == (None, 1e-4)
    names = KeyAxis.of("layer", ["relu", True, "relu", None])
    assert (names.number("relu"), names.number(True), names.number("new")) == (0.0, 1.0, None)
    assert [text for _, text in names.ticks(5)] == ["relu", "true"]
    assert KeyAxis.of("none", []).ticks(5) == []
