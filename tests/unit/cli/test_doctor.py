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


def test_a_job_that_slurm_refuses_is_a_finding_among_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = "SLURM_VERSION = 24.11.5\nClusterName = lab\nAccountingStorageEnforce = associations,limits"
    scripts = {
        "scontrol": f"case \"$*\" in *config) echo '{config}';; *) echo PartitionName=low Default=YES State=UP;; esac",
        "sacctmgr": "echo 'lab|00:30:00'",
        "sbatch": "echo 'sbatch: error: Invalid account or account/partition combination specified' >&2; exit 1",
    }
    for name, script in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    assert main(["doctor", "cluster=slurm", "--json"]) == 2
    record = json.loads(capsys.readouterr().out)
    assert [(one["severity"], one["check"]) for one in record["findings"]] == [("error", "job"), ("warning", "account")]
    assert record["findings"][0]["problem"].startswith("sbatch refused the job: Invalid account")
    assert "sacctmgr show associations user=$USER" in record["findings"][0]["remedy"]


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
