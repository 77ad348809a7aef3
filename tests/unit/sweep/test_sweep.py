from __future__ import annotations

import pytest

from hpctrain.cli import main
from hpctrain.errors import ConfigError
from hpctrain.launch.prepare import plan
from hpctrain.sweep.sweep import by_resources, require_one_cluster


def test_runs_that_ask_for_the_same_share_an_array(composer):
    runs = [
        plan(composer.compose(["cluster=slurm", f"nodes={nodes}", f"optimizer.lr={lr}"]))
        for nodes in (1, 2)
        for lr in (1e-3, 3e-4)
    ]
    assert by_resources(runs) == [[0, 1], [2, 3]]


def test_other_memory_is_another_array(composer):
    runs = [plan(composer.compose(["cluster=slurm", f"cluster.memory_gb={memory}"])) for memory in (1, 2, 1)]
    assert by_resources(runs) == [[0, 2], [1]]


def test_two_kinds_of_cluster_are_refused(composer):
    with pytest.raises(ConfigError, match="can't be swept over"):
        require_one_cluster([composer.compose([]), composer.compose(["cluster=slurm"])])


def test_resume_skips_the_runs_that_cant_be_read(many, capsys):
    many[0].config.write_text("seed: [")
    many[1].attempts.mkdir()
    assert main(["resume", "many", "cluster.dry_run=true"]) == 2
    out, err = capsys.readouterr()
    assert [line.split(": ")[2] for line in err.splitlines()] == ["many/0", "many/1"]
    assert "many/2" in out
    assert "many/1" not in out


def test_a_change_that_no_run_can_take_is_refused_once(many, capsys):
    many[0].config.write_text("seed: [")
    assert main(["resume", "many", "cluster.dry_run=true", "trainer.absent=1"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("hpctrain: error: trainer.absent")
