from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpctrain.run.checkpoints import saved_step
from hpctrain.run.directory import RunDirectory
from hpctrain.run.saves import last_save, read_saves, record_save


@pytest.fixture
def directory(tmp_path):
    made = RunDirectory.at(tmp_path / "run")
    made.create(0o750)
    return made


def save(directory, step, path, attempt=1):
    path.touch()
    record_save(directory, attempt, step, path)


def test_the_newest_save_that_exists_counts(directory, tmp_path):
    assert (saved_step(directory), last_save(directory)) == (0, None)
    save(directory, 5, directory.checkpoints / "five.pt")
    save(directory, 10, tmp_path / "elsewhere.pt")
    save(directory, 15, directory.checkpoints / "fifteen.pt", attempt=2)
    assert [(one.step, one.attempt) for one in read_saves(directory)] == [(5, 1), (10, 1), (15, 2)]
    assert saved_step(directory) == 15
    (directory.checkpoints / "fifteen.pt").unlink()
    assert (last_save(directory).path, saved_step(directory)) == (tmp_path / "elsewhere.pt", 10)


def test_a_run_that_was_moved_finds_its_saves(directory):
    save(directory, 5, directory.checkpoints / "five.pt")
    moved = directory.path.rename(directory.path.with_name("moved"))
    assert last_save(RunDirectory(moved)).path == moved / "checkpoints" / "five.pt"


def test_records_that_someone_has_edited_are_left_out(directory):
    save(directory, 5, directory.checkpoints / "five.pt")
    with directory.saves.open("a") as file:
        file.write('{"step": -1, "path": "x", "time": 1, "attempt": 1}\n{"step": 7}\n[]\n{"step": 9, "pa')
    assert [one.step for one in read_saves(directory)] == [5]
    record_save(directory, 1, 6, Path(os.devnull))
    assert saved_step(directory) == 6


def test_saves_that_cant_be_read_are_none(directory):
    directory.saves.mkdir()
    assert (read_saves(directory), saved_step(directory)) == ([], 0)


def test_a_path_that_cant_be_looked_up_is_no_save(directory):
    save(directory, 5, directory.checkpoints / "five.pt")
    record_save(directory, 1, 6, directory.checkpoints / ("x" * 300))
    assert (last_save(directory).step, saved_step(directory)) == (5, 5)
