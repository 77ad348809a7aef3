from __future__ import annotations

import pytest

from hpctrain.config.compose import Composer
from hpctrain.errors import ConfigError
from hpctrain.search.algorithm import MAX_RUNS, expand
from hpctrain.search.runs import with_progress


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
