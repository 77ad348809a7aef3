"""A run of a search, made from the values that were drawn for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.errors import RunDirectoryError
from hpctrain.run.code import CodeSnapshot, describe_file, digest_of, list_of, record_code, write_files
from hpctrain.run.directory import RunDirectory
from hpctrain.run.sweep_record import SweepRecord
from hpctrain.search.search import Assignment
from hpctrain.search.task import drawn_run


def optuna(folder: Path, *fixed: str) -> SweepRecord:
    space = {"optimizer.lr": "interval(1e-4,1e-1)"}
    return SweepRecord(kind="optuna", space=space, fixed=[*fixed], folder=str(folder), submitted=0.0, command=())


FIRST = Assignment(run=0, rung=0, pause_at_step=None, drawn={"params": {"optimizer.lr": 0.01}})


def test_what_all_runs_share_is_not_varied_however_it_was_typed(tmp_path: Path) -> None:
    record = optuna(tmp_path, "+optimizer.amsgrad=true", "trainer.max_steps=1")
    run = drawn_run(RunDirectory.at(tmp_path), record, FIRST)
    assert list(run.varied) == ["optimizer.lr"]


def test_code_that_was_purged_is_not_taken_for_values_that_do_not_fit(tmp_path: Path) -> None:
    home = RunDirectory.at(tmp_path / "sweep")
    folder = home.code / "d1"
    folder.mkdir(parents=True)
    for name in ("mine.py", "other.py"):
        (folder / name).write_text("x = 1\n")
    files = [describe_file(folder / name, name) for name in ("mine.py", "other.py")]
    digest = digest_of(files)
    write_files(list_of(home.code / digest), files)
    code = CodeSnapshot(run=home, digest=digest, folder=folder.rename(home.code / digest), root=tmp_path, place=".")
    record_code(home, code, 1.0)
    (code.folder / "mine.py").write_text("changed")  # the launcher of each attempt compares contents, and names it
    assert drawn_run(home, optuna(tmp_path), FIRST).varied
    for name in ("mine.py", "other.py"):
        (code.folder / name).unlink()
    with pytest.raises(RunDirectoryError, match=r"2 of 2 files were removed .*\(mine\.py, other\.py\): restore them"):
        drawn_run(home, optuna(tmp_path, "task=custom", "task._target_=mine.Mine"), FIRST)
