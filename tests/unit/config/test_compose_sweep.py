"""The group of the command that makes a sweep: its keys, its mistakes, and what is split off for it."""

from __future__ import annotations

import pytest

from hpctrain.config.compose import Composer, SweepComposer, split_sweep
from hpctrain.config.sweep import Asha, Grid, Optuna, Random, kind_of
from hpctrain.errors import ConfigError


@pytest.fixture(scope="module")
def composer():
    return SweepComposer()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], Grid()),
        (["sweep=random", "sweep.num_runs=40", "sweep.seed=3"], Random(num_runs=40, seed=3)),
        (["sweep.min_steps=10", "sweep=asha"], Asha(min_steps=10)),
        (["sweep=optuna", "sweep.sampler=gp", "sweep.time_limit_min=1.5"], Optuna(sampler="gp", time_limit_min=1.5)),
    ],
)
def test_each_option_has_its_keys(composer, words, expected):
    assert composer.compose_sweep(words) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sweep=ahsa"], "sweep=ahsa: is not an option of the group sweep; .*did you mean asha"),
        (["sweep=random", "sweep.num_run=3"], "sweep.num_run=3: .*did you mean sweep.num_runs"),
        (["sweep=random", "sweep.min_steps=1"], "sweep.min_steps=1: exists only with sweep=asha; add sweep=asha"),
        (["sweep.num_runs=3"], "sweep.num_runs=3: exists only with .*grid decide.*; add sweep=random"),
        (["sweep=random,asha"], "sweep=random,asha: has several values; choose one option"),
        (["sweep=random", "sweep.num_runs=0"], "sweep.num_runs=0: must be at least 1"),
        (["sweep=asha", "sweep.reduction_factor=1"], "sweep.reduction_factor=1: must be at least 2"),
        (["sweep=optuna", "sweep.sampler=tpx"], "sweep.sampler=tpx: is not known; choose one of"),
        (["sweep.time_limit_min=nan"], "sweep.time_limit_min=nan: must be a number above 0"),
        (["sweep=random", "sweep.num_runs=4,8"], "sweep.num_runs=4,8: has several values; write one value$"),
        (["~sweep"], "^~sweep=: must not begin with"),
        (["+sweep.own=1"], r"^\+sweep.own=1: must not begin with . or ~; write sweep.KEY=VALUE"),
    ],
)
def test_a_mistake_names_the_key_and_what_to_type(composer, words, message):
    with pytest.raises(ConfigError, match=message):
        composer.compose_sweep(words)


def test_an_option_of_the_user_extends_one_of_hpctrains(tmp_path):
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "long.yaml").write_text("defaults:\n  - asha\n  - _self_\n\nmin_steps: 500\n")
    sweep = SweepComposer(str(tmp_path)).compose_sweep(["sweep=long", "sweep.num_runs=9"])
    assert (kind_of(sweep), sweep) == ("asha", Asha(min_steps=500, num_runs=9))


def test_the_overrides_of_the_sweep_are_split_from_those_of_its_runs():
    assert split_sweep(["sweep=random", "seed=1", "+sweep.x=1", "sweeper=2", "~sweep"]) == (
        ["sweep=random", "+sweep.x=1", "~sweep"],
        ["seed=1", "sweeper=2"],
    )


@pytest.mark.parametrize("word", ["sweep=random", "sweep.num_runs=3"])
def test_a_single_run_has_no_sweep(word):
    with pytest.raises(ConfigError, match=f"is a key of sweeps, which need -m; write -m {word}"):
        Composer().compose([word])
