from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpctrain.errors import RunDirectoryError
from hpctrain.status.runs import find_runs, run_of, runs_of


def make(root, *names):
    for age, name in enumerate(reversed(names)):
        (root / name).mkdir(parents=True, exist_ok=True)
        config = root / name / "config.yaml"
        config.touch()
        os.utime(config, (1000 - age, 1000 - age))


def found(root):
    return [str(run.path.relative_to(root)) for run in find_runs(root)]


def test_runs_are_found_at_any_level_newest_first(tmp_path):
    make(tmp_path, "old", "digits/2025-01-01_10-00-00", "sweep/0", "sweep/1", "by/hand/and/deep")
    assert found(tmp_path) == ["by/hand/and/deep", "sweep/1", "sweep/0", "digits/2025-01-01_10-00-00", "old"]


def test_a_run_itself_is_found(tmp_path):
    make(tmp_path, "run")
    assert found(tmp_path / "run") == ["."]


def test_nothing_inside_a_run_and_nothing_hidden_is_a_run(tmp_path):
    make(tmp_path, "run", "run/checkpoints/old", "sweep/.hydra", "sweep/0")
    assert set(found(tmp_path)) == {"run", "sweep/0"}


def test_links_that_lead_in_circles_end(tmp_path):
    make(tmp_path, "a/b/run")
    (tmp_path / "a" / "b" / "up").symlink_to(tmp_path)
    (tmp_path / "linked").symlink_to(tmp_path / "a" / "b" / "run")
    assert set(found(tmp_path)) == {"a/b/run", "linked"}


def test_a_folder_that_does_not_exist_has_no_runs(tmp_path):
    assert find_runs(tmp_path / "absent") == []


def test_a_run_is_named_by_its_path_or_by_its_name_under_runs(tmp_path, monkeypatch):
    make(tmp_path, "runs/digits/first", "elsewhere")
    monkeypatch.chdir(tmp_path)
    runs_dir = Path("runs")
    wanted = tmp_path / "runs" / "digits" / "first"
    for typed in ("runs/digits/first", "runs/digits/first/", "digits/first", "digits", str(wanted)):
        assert run_of(typed, runs_dir).path == wanted
    assert run_of("elsewhere", runs_dir).path == tmp_path / "elsewhere"


def test_a_sweep_is_several_runs(tmp_path, monkeypatch):
    make(tmp_path, "runs/sweep/0", "runs/sweep/1", "runs/sweep/2")
    monkeypatch.chdir(tmp_path)
    assert [run.path.name for run in runs_of("sweep", Path("runs"))] == ["2", "1", "0"]
    with pytest.raises(
        RunDirectoryError, match=r"sweep: it contains 3 runs; name one of them: runs/sweep/0, runs/sweep/1"
    ):
        run_of("sweep", Path("runs"))


def test_a_path_without_a_run_is_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunDirectoryError, match="empty: it contains no run; `python -m hpctrain status` lists"):
        runs_of("empty", Path("runs"))
    (tmp_path / "runs" / "lr").mkdir(parents=True)
    with pytest.raises(RunDirectoryError, match="lr: it contains no run"):
        runs_of("lr", Path("runs"))
    with pytest.raises(RunDirectoryError, match="digits: no such path, here or under runs/"):
        run_of("digits", Path("runs"))
