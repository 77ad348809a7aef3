from __future__ import annotations

import json

import pytest

from hpctrain.cli import main
from hpctrain.run.directory import RunDirectory
from tests.support.logged_run import LoggedRun


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("one", "sweep/0", "sweep/1"):
        directory = RunDirectory.at(tmp_path / "runs" / name)
        directory.create(0o750)
        run = LoggedRun(directory)
        directory.config.write_text(json.dumps({"name": "made", "task": {"_target_": "mine.Task"}}))
        run.train(0, 10)
    return tmp_path / "runs"


def test_a_run(runs, capsys):
    assert main(["report", "one"]) == 0
    assert capsys.readouterr().out.startswith("wrote runs/one/report.html (")
    assert (runs / "one" / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert (runs / "one" / "report.html").stat().st_mode & 0o777 == 0o640


def test_a_sweep(runs, capsys):
    assert main(["report", "runs/sweep"]) == 0
    assert "wrote runs/sweep/report.html" in capsys.readouterr().out
    assert "a sweep</title>" in (runs / "sweep" / "report.html").read_text()
    # the page is neither a run nor in the way of one
    assert main(["status", "sweep"]) == 0


def test_a_run_of_a_sweep(runs):
    assert main(["report", "sweep/1", "-o", "page.html"]) == 0
    assert "<title>sweep/1 " in (runs.parent / "page.html").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["report", "nowhere"], "nowhere: no such path, here or under runs/"),
        (["report", "one", "-o", "missing/page.html"], "can't be written (No such file or directory)"),
        (["report", "one", "-o", "runs"], "can't be written (Is a directory)"),
    ],
    ids=" ".join,
)
def test_mistakes(runs, capsys, words, message):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
