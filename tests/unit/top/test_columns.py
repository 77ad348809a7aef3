from __future__ import annotations

from dataclasses import replace

import pytest

from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Attempt
from hpctrain.status.run_status import RunStatus
from hpctrain.status.state import RunState
from hpctrain.top.columns import (
    COLUMNS,
    METRIC,
    PROGRESS,
    RUN,
    STATE,
    TableView,
    gap,
    in_order,
    matches,
    short_varied,
    widths,
)
from hpctrain.top.watch import WatchedRun

SHOWN = TableView("eval/loss", 1000.0)


def run(name, *, state=RunState.RUNNING, **fields):
    directory = RunDirectory.at(f"/runs/{name}")
    watched = WatchedRun(directory, name)
    watched.status = RunStatus(name="digits", path=directory.path, state=state, **fields)
    return watched


def test_runs_without_a_value_come_last_in_both_orders():
    runs = [run("a", metrics={"eval/loss": 2.0}), run("b"), run("c", metrics={"eval/loss": float("nan")})]
    runs.append(run("d", metrics={"eval/loss": 1.0}))
    assert [one.name for one in in_order(runs, replace(SHOWN, by=METRIC))] == ["d", "a", "b", "c"]
    assert [one.name for one in in_order(runs, replace(SHOWN, by=METRIC, descending=True))] == ["a", "d", "b", "c"]


def test_numbers_in_names_sort_as_numbers():
    runs = [run("sweep/10"), run("sweep/9"), run("other/1")]
    assert [one.name for one in in_order(runs, replace(SHOWN, by=RUN))] == ["other/1", "sweep/9", "sweep/10"]


def test_every_column_sorts_runs_of_which_nothing_is_known():
    runs = [run("a"), run("b", state=RunState.FAILED, note="why", job_ids=("12_3",))]
    for column in COLUMNS:
        assert len(in_order(runs, replace(SHOWN, by=column, descending=True))) == 2
        assert isinstance(column.text(runs[0], SHOWN), str)


@pytest.mark.parametrize(
    ("step", "total", "text"),
    [(0, 8, "······   0%"), (1, 2, "███···  50%"), (9, 8, "██████ 100%"), (5, None, "step 5")],
)
def test_progress(step, total, text):
    begun = (Attempt(attempt=1),)
    assert PROGRESS.text(run("a", step=step, total_steps=total, attempts=begun), SHOWN) == text


def test_a_filter_has_words_in_any_case():
    one = run("sweep/3", state=RunState.FAILED, note="rank 3 on n2 failed", varied={"optimizer.lr": "0.1"})
    assert matches(one, ["sweep", "failed", "lr=0.1", "n2"])
    assert not matches(one, ["sweep", "running"])


def test_keys_lose_their_groups_unless_they_end_alike():
    assert short_varied({"optimizer.lr": "0.1", "seed": "1"}) == "lr=0.1 seed=1"
    assert short_varied({"a.lr": "1", "b.lr": "2"}) == "a.lr=1 b.lr=2"


@pytest.mark.parametrize("total", [10, 40, 80, 120, 200, 400])
def test_columns_fill_the_line_and_no_more(total):
    needed = {"RUN": 26, "VARIED": 30, "REASON": 90}
    found = widths(total, needed)
    assert list(found) == [column.title for column in COLUMNS if column.title in found]
    assert sum(found.values()) + gap(total) * (len(found) - 1) <= max(total, 16)
    assert RUN.title in found
    if total >= 80:
        assert {STATE.title, PROGRESS.title, METRIC.title, VARIED_TITLE} <= set(found)


VARIED_TITLE = "VARIED"


def test_a_column_without_texts_is_left_out():
    assert "VARIED" not in widths(200, {"RUN": 5, "VARIED": 0, "REASON": 0})
