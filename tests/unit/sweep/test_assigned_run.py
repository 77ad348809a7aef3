"""A run of a search, made from the values that were drawn for it."""

from __future__ import annotations

from pathlib import Path

from hpctrain.run.directory import RunDirectory
from hpctrain.search.record import SweepRecord
from hpctrain.search.search import Assignment
from hpctrain.sweep.assigned_run import drawn_run


def test_what_all_runs_share_is_not_varied_however_it_was_typed(tmp_path: Path) -> None:
    record = SweepRecord(
        kind="optuna",
        space={"optimizer.lr": "interval(1e-4,1e-1)"},
        fixed=["+optimizer.amsgrad=true", "trainer.max_steps=1"],
        folder=str(tmp_path),
        submitted=0.0,
        command=(),
    )
    drawn = {"params": {"optimizer.lr": 0.01}}
    run = drawn_run(RunDirectory.at(tmp_path), record, Assignment(run=0, rung=0, pause_at_step=None, drawn=drawn))
    assert list(run.varied) == ["optimizer.lr"]
