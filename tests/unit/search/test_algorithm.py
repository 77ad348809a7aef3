from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.config.compose import Composer
from hpctrain.errors import ConfigError
from hpctrain.search.algorithm import MAX_RUNS, expand, promotable
from hpctrain.search.journal import JournalEvent, SearchDecision
from hpctrain.search.runs import with_progress
from tests.support.searching import asha, prepared


@pytest.fixture(scope="module")
def composer() -> Composer:
    return Composer()


@pytest.mark.parametrize(
    ("overrides", "runs"),
    [
        (["seed=1,2", "nodes=3"], [["seed=1", "nodes=3"], ["seed=2", "nodes=3"]]),
        (["seed=1,2", "nodes=3,4"], [[f"seed={s}", f"nodes={n}"] for s in (1, 2) for n in (3, 4)]),
        (["seed=range(5,1,-2)"], [["seed=5"], ["seed=3"]]),
        (["optimizer.lr=range(0,0.5,0.2)"], [["optimizer.lr=0.0"], ["optimizer.lr=0.2"], ["optimizer.lr=0.4"]]),
        (["optimizer=glob([a*,sg*])"], [["optimizer=adamw"], ["optimizer=sgd"]]),
        (["optimizer=glob(*,exclude=[custom,layer_decay,muon,named])"], [["optimizer=adamw"], ["optimizer=sgd"]]),
        (["cluster.partition='low,high',mid"], [["cluster.partition='low,high'"], ["cluster.partition=mid"]]),
        (["cluster.partition='low,high'"], [["cluster.partition='low,high'"]]),
        (["seed=1,2", "seed=3"], [["seed=3"]]),
        ([], [[]]),
    ],
)
def test_the_runs_of_a_sweep(composer: Composer, overrides: list[str], runs: list[list[str]]) -> None:
    assert expand(composer.parse(overrides)) == runs


def test_the_bound_counts_the_product_before_making_it(composer: Composer) -> None:
    assert len(expand(composer.parse([f"seed=range(0,{MAX_RUNS})"]))) == MAX_RUNS
    with pytest.raises(ConfigError, match="makes 20,000 runs"):
        expand(composer.parse([f"seed=range(0,{MAX_RUNS})", "nodes=1,2"]))


def test_a_slow_sweep_shows_progress_and_a_quick_one_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    now = iter([0.0, 0.1, 1.9, 2.0, 2.0, 2.1])
    assert list(with_progress("abcd", "composed", lambda: next(now))) == list("abcd")
    assert capsys.readouterr().err == "2 of 4 runs composed\n"
    assert list(with_progress("abcd", "composed")) == list("abcd")
    assert capsys.readouterr().err == ""


def end(run: int, value: float | None, rung: int = 0, reason: str = "paused", mode: str = "max") -> SearchDecision:
    return SearchDecision(event=JournalEvent.END, run=run, rung=rung, value=value, mode=mode, reason=reason)


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
