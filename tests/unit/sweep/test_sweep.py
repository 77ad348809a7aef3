from __future__ import annotations

import pytest

import hpctrain.sweep.sweep as module
from hpctrain.cli import main
from hpctrain.config.compose import Composer
from hpctrain.config.identity import flat
from hpctrain.config.stored import load
from hpctrain.errors import ConfigError
from hpctrain.launch.prepare import plan, prepare
from hpctrain.run.directory import RunDirectory
from hpctrain.sweep.stored_values import stored_values
from hpctrain.sweep.sweep import Sweep, SweepRun, by_resources, require_one_cluster


@pytest.fixture(scope="module")
def composer():
    return Composer()


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


@pytest.fixture
def many(composer, tmp_path, monkeypatch):
    """A sweep of three runs, none of them started."""
    monkeypatch.chdir(tmp_path)
    return [prepare(composer.compose([f"run_dir=many/{n}", f"seed={n}"]), []).directory for n in range(3)]


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


@pytest.mark.parametrize("line", ["seed: [", "absent: 1"])
def test_the_number_of_a_run_that_cant_be_read_is_taken(many, composer, capsys, line):
    many[0].config.write_text(f"{many[0].config.read_text()}{line}\n")
    sweep = Sweep(RunDirectory.at("many"), [])
    placed = sweep.place([SweepRun(composer.compose([f"seed={n}"]), {"seed": str(n)}) for n in (0, 1, 7)])
    assert [run.directory.path.name for run in placed] == ["3", "1", "4"]
    err = capsys.readouterr().err
    assert err.startswith("hpctrain: warning: many/0: ")
    assert err.count("\n") == 1


def test_a_sweep_reads_each_of_its_runs_once(many, composer, monkeypatch):
    read, loaded = [], []
    monkeypatch.setattr(module, "stored_values", lambda path: read.append(path.parent.name) or stored_values(path))
    monkeypatch.setattr(module, "load", lambda path: loaded.append(path.parent.name) or load(path))
    sweep = Sweep(RunDirectory.at("many"), [])
    for seed in (7, 8, 2):
        (placed,) = sweep.place([SweepRun(composer.compose([f"seed={seed}"]), {"seed": str(seed)})])
        prepare(placed.config, [])
    assert sorted(read) == ["0", "1", "2", "3", "4"]
    assert loaded == ["2"]  # to check the one that continues


def test_a_launched_run_is_read_again(many, composer):
    sweep = Sweep(RunDirectory.at("many"), [])
    for steps in (5, 6):
        config = composer.compose(["seed=1", f"trainer.max_steps={steps}", "cluster.dry_run=true"])
        sweep.launch(placed := sweep.place([SweepRun(config)]))
        prepare(placed[0].config, [])
        assert sweep._values(many[1])["trainer.max_steps"] == steps


@pytest.mark.parametrize("words", [["optimizer.lr=1e-5"], ["cluster=slurm", "optimizer=sgd", "model=convnet"]])
def test_the_values_of_a_file_are_those_that_load_gives(composer, tmp_path, words):
    directory = prepare(composer.compose([*words, f"run_dir={tmp_path / 'run'}"]), []).directory
    assert repr(sorted(stored_values(directory.config).items())) == repr(sorted(flat(load(directory.config)).items()))


def test_a_run_of_an_earlier_version_or_edited_by_hand_is_the_same_run(many, composer):
    config = composer.compose(["seed=1", "trainer.clip_grad_norm=1.0"])
    text = prepare(composer.compose(["run_dir=many/3", "seed=1", "trainer.clip_grad_norm=1.0"]), []).directory.config
    lines = [line for line in text.read_text().splitlines() if "channels_last" not in line]
    text.write_text("\n".join(lines).replace("clip_grad_norm: 1.0", "clip_grad_norm: 1"))
    (placed,) = Sweep(RunDirectory.at("many"), []).place([SweepRun(config)])
    assert placed.directory.path.name == "3"
