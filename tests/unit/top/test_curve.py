from __future__ import annotations

import itertools
import math

from hpctrain.top.curve import POINTS, LiveCurve, plot, sparkline


def test_a_curve_stays_small_and_keeps_its_newest_point():
    curve = LiveCurve()
    for step in range(20_000):
        curve.add(step, float(step))
        assert curve.points()[-1] == (step, step)
    points = curve.points()
    assert POINTS // 2 <= len(points) <= POINTS
    steps = [step for step, _ in points]
    assert steps == sorted(set(steps))
    assert max(later - step for step, later in itertools.pairwise(steps)) <= 2 * 20_000 // (POINTS // 2)


def test_a_sparkline_shows_lowest_and_highest_values():
    assert sparkline([0, 1, 2, 3], 8) == "▁▃▆█"
    assert sparkline([5, 5], 8) == "▁▁"
    assert sparkline([1, math.nan, math.inf, 2], 8) == "▁!!█"
    assert sparkline([], 8) == ""
    assert sparkline([-1.7e308, 1.7e308], 8) == "▁█"
    assert sparkline(range(100), 4) == "▁▃▆█"


def test_a_plot_has_its_range_and_its_steps():
    lines = plot([(step, 1.0 - step / 100) for step in range(0, 101, 10)], 40, 6)
    assert len(lines) == 6
    assert {len(line) for line in lines} == {40}
    assert lines[0].split("│")[0].strip() == "1"
    assert lines[4].split("│")[0].strip() == "0"
    assert lines[0].split("│")[1][0] != "\u2800" != lines[4].split("│")[1][-1]
    assert lines[5].split() == ["step", "0", "100"]


def test_a_plot_of_nothing():
    assert plot([], 40, 6) == plot([(1, math.nan)], 40, 6) == ["no finite value yet"]
    assert len(plot([(1, 2.0)], 40, 4)) == 4
