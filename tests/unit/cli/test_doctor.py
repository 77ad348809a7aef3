"""The command line of `doctor`, where there is no SLURM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpctrain.cli import main


@pytest.fixture(autouse=True)
def no_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))


def test_this_machine_without_slurm(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "this machine: python 3." in shown
    assert "no fault was found" in shown
    assert list(Path("runs").iterdir()) == []


def test_a_cluster_without_slurm_would_fail(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "cluster=slurm", "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert record["would_fail"]
    assert [(one["severity"], one["check"]) for one in record["findings"]] == [("error", "slurm")]
    assert record["job_id"] is None


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["nodes=0"], "nodes=0"),
        (["cluster=slurm", "cluster.dry_run=true"], "cluster.dry_run=True"),
        (["absent"], "absent is neither KEY=VALUE nor the folder of an examination"),
        (["--site", "slurm"], "--site slurm: expected"),
        (["--site", "../x"], "--site ../x: expected a letter, then letters, digits and _"),
    ],
)
def test_words_that_cannot_work(words: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["doctor", *words])
    except SystemExit as error:
        code = int(error.code or 0)
    assert code == 2
    shown = capsys.readouterr().err
    assert problem in shown
    assert len(shown.strip().splitlines()) == 1
    assert not Path("runs").exists()
