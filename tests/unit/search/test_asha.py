"""Which runs of an asha search continue."""

from __future__ import annotations

from pathlib import Path

from searching import asha, prepared

from hpctrain.search.algorithm import promotable
from hpctrain.search.journal import Decision, Event


def end(run: int, value: float | None, rung: int = 0, reason: str = "paused", mode: str = "max") -> Decision:
    return Decision(event=Event.END, run=run, rung=rung, value=value, mode=mode, reason=reason)


def test_rungs_are_powers_of_the_reduction_factor(tmp_path: Path) -> None:
    home = prepared(tmp_path, 1)
    assert [asha(home).algorithm.pause_at_step(rung) for rung in range(4)] == [10, 30, 90, 270]


def test_one_in_three_continues_the_best_first() -> None:
    ends = [end(run, value) for run, value in enumerate([0.1, 0.5, 0.3, 0.9, 0.2, 0.4])]
    assert promotable(ends[:2], set(), reduction_factor=3) == []
    assert promotable(ends[:3], set(), reduction_factor=3) == [(1, 1)]
    assert promotable(ends, set(), reduction_factor=3) == [(3, 1), (1, 1)]
    assert promotable(ends, {(3, 1)}, reduction_factor=3) == [(1, 1)]


def test_smaller_losses_are_better_and_ties_go_to_the_lower_number() -> None:
    ends = [end(run, value, mode="min") for run, value in enumerate([0.5, 0.1, 0.1, 0.7])]
    assert promotable(ends, set(), reduction_factor=2) == [(1, 1), (2, 1)]


def test_the_most_advanced_run_comes_first() -> None:
    ends = [end(0, 0.1), end(1, 0.2), end(2, 0.3), end(3, 0.9), end(2, 0.3, 1), end(3, 0.4, 1)]
    assert promotable(ends, {(2, 1), (3, 1)}, reduction_factor=2) == [(3, 2)]


def test_failed_runs_count_for_nothing_and_completed_ones_stay_among_the_best() -> None:
    ends = [end(0, None, reason="failed"), end(1, 0.9, reason="completed"), end(2, 0.5), end(3, None), end(4, 0.1)]
    assert promotable(ends, set(), reduction_factor=2) == []
    assert promotable([*ends, end(5, 0.2)], set(), reduction_factor=2) == [(2, 1)]
