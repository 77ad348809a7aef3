from __future__ import annotations

import pytest

from hpctrain.cli import main
from hpctrain.config.compose import Composer
from hpctrain.launch.prepare import prepare
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Ledger
from hpctrain.run.owner import Owner

SITE = "defaults: [slurm, _self_]\npartition: long\n"


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return prepare(Composer().compose(["run_dir=mine"]), []).directory


def goes_on(directory):
    """As if this process trained it."""
    ledger = Ledger(directory)
    Owner.write(directory.claim(ledger.claim()))


@pytest.mark.parametrize("before", [[], ["nodes=2"]])
def test_changes_may_stand_before_and_after_a_flag(run, tmp_path, capsys, before):
    folder = tmp_path / "site" / "cluster"
    folder.mkdir(parents=True)
    (folder / "ours.yaml").write_text(SITE)
    words = [*before, "--config-dir", "site", "cluster=ours", "cluster.dry_run=true"]
    assert main(["resume", str(run.path), *words]) == 0
    assert "#SBATCH --partition=long" in capsys.readouterr().out


def test_a_run_that_goes_on_is_refused(run, capsys):
    goes_on(run)
    assert main(["resume", str(run.path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("number", [0, 1])
def test_a_sweep_onto_one_that_goes_on_is_refused_before_anything_is_written(tmp_path, monkeypatch, capsys, number):
    monkeypatch.chdir(tmp_path)
    words = ["-m", "run_dir=many", "optimizer.lr=1e-3,3e-4", "trainer.max_steps=1"]
    goes_on(prepare(Composer().compose([f"run_dir=many/{number}"]), []).directory)
    before = sorted(tmp_path.rglob("*"))
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(
        f"hpctrain: error: {RunDirectory.at(tmp_path / 'many' / str(number)).path} is starting; end it "
    )
    assert sorted(tmp_path.rglob("*")) == before
