"""Optuna's samplers behind a journal draw what they draw in a plain loop."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
import pytest

from hpctrain.run.reason import Reason
from hpctrain.search.distribution import distributions_of
from hpctrain.search.journal import read_journal
from hpctrain.search.optuna_study import RECORD_ERRORS, restore_sampler, sampler_state, to_optuna
from hpctrain.search.search import Search
from tests.support.searching import prepared, record_of, train

LR = "tag(log,interval(1e-5,1e-1))"
SPACE = {"lr": LR, "width": "int(interval(1,8))", "optimizer": "adamw,sgd"}
NUMBERS = {"lr": LR, "momentum": "interval(0.0,0.9)"}


def accuracy(params: Mapping[str, Any]) -> float:
    width = params.get("width", 4)
    return 1 / (1 + (math.log10(params["lr"]) + 3) ** 2 + 0.1 * abs(width - 4) + params.get("momentum", 0.0))


def plain(sampler, space, num_runs: int) -> list[dict[str, Any]]:
    """What somebody writes who has only Optuna."""
    study = optuna.create_study(sampler=sampler, direction="maximize")
    drawn = []
    for _ in range(num_runs):
        trial = study.ask({key: to_optuna(one) for key, one in space.items()})
        drawn.append(dict(trial.params))
        study.tell(trial, accuracy(trial.params))
    return drawn


def optuna_search(home, space, num_runs: int, sampler: str = "tpe") -> Search:
    options = {"space": space, "num_runs": num_runs, "sampler": sampler, "startup_runs": 4, "seed": 3}
    return Search(home, record_of(home, "optuna", **options))


@pytest.mark.parametrize(
    ("name", "space", "num_runs"),
    [
        ("tpe", SPACE, 14),
        ("cmaes", NUMBERS, 14),
        pytest.param("gp", NUMBERS, 8, marks=pytest.mark.filterwarnings("ignore")),
        ("random", SPACE, 4),
        pytest.param("tpe", SPACE, 60, marks=pytest.mark.nightly),
        pytest.param("cmaes", NUMBERS, 60, marks=pytest.mark.nightly),
        pytest.param("gp", SPACE, 30, marks=[pytest.mark.nightly, pytest.mark.filterwarnings("ignore")]),
    ],
)
def test_runs_one_after_another_get_what_a_plain_loop_gets(tmp_path: Path, name: str, space, num_runs: int) -> None:
    home = prepared(tmp_path, num_runs)
    drawn = []
    for task in range(num_runs):
        search = optuna_search(home, space, num_runs, name)  # a new process each time
        begin = search.ask(f"7_{task}")
        assert begin is not None
        assert begin.run == task
        drawn.append(dict(begin.drawn["params"]))
        train(search, begin, accuracy(drawn[-1]), reason=Reason.COMPLETED)
    samplers = optuna.samplers
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sampler = {
            "tpe": lambda: samplers.TPESampler(seed=3, n_startup_trials=4, constant_liar=True),
            "cmaes": lambda: samplers.CmaEsSampler(seed=3, n_startup_trials=4),
            "gp": lambda: samplers.GPSampler(seed=3, n_startup_trials=4),
            "random": lambda: samplers.RandomSampler(seed=3),
        }[name]()
        assert drawn == plain(sampler, distributions_of(record_of(home, "optuna", space=space)), num_runs)


def test_a_requeued_task_keeps_its_values_and_failed_runs_are_left_out(tmp_path: Path) -> None:
    home = prepared(tmp_path, 6)
    first = optuna_search(home, SPACE, 6).ask("7_0")
    assert first is not None
    assert optuna_search(home, SPACE, 6).ask("7_0") == first
    second = optuna_search(home, SPACE, 6).ask("7_1")
    assert second is not None
    assert second.drawn["params"] != first.drawn["params"]
    search = optuna_search(home, SPACE, 6)
    train(search, first, 0.5, reason=Reason.FAILED)
    train(search, second, 0.5, reason=Reason.COMPLETED)
    third = search.ask("7_2")
    assert third is not None
    assert third.run == 2


def test_a_lost_state_of_the_sampler_costs_only_the_reproducibility(tmp_path: Path) -> None:
    home = prepared(tmp_path, 3)
    for task in range(2):
        assert optuna_search(home, SPACE, 3).ask(f"7_{task}") is not None
        for file in (tmp_path / "search").glob("sampler-*"):
            file.write_text('{"random": {')
    assert optuna_search(home, SPACE, 3).ask("7_2") is not None
    params = [one.drawn["params"] for one in read_journal(home)]
    assert len({str(one) for one in params}) == 3


@pytest.mark.parametrize(
    "changed",
    [
        {"pos": 2**31},
        {"pos": -1},
        {"pos": "x"},
        {"key": "AAAA"},
        {"key": 3},
    ],
)
def test_the_state_of_a_sampler_is_checked_before_numpy_trusts_it(changed) -> None:
    sampler = optuna.samplers.RandomSampler(seed=1)
    state = sampler_state(sampler)
    (path,) = state["random"]
    state["random"][path] |= changed
    with pytest.raises(RECORD_ERRORS):
        restore_sampler(sampler, state)


@pytest.mark.parametrize(
    "damage", [{"distributions": {"lr": "x"}}, {"params": {"other": 1}}, {"params": 3}, {"sampler": []}]
)
def test_a_search_survives_a_damaged_draw(tmp_path: Path, damage) -> None:
    home = prepared(tmp_path, 2)
    search = optuna_search(home, SPACE, 2)
    begin = search.ask("7_0")
    assert begin is not None
    train(search, begin, 0.5, reason=Reason.COMPLETED)
    search.state()
    path = tmp_path / "search" / "000001.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"drawn": record["drawn"] | damage}))
    assert optuna_search(home, SPACE, 2).ask("7_1").run == 1
