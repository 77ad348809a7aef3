import dataclasses
import json
import re

import pytest

from hpctrain.config.compose import Composer
from hpctrain.config.stored import load
from hpctrain.errors import ConfigError, RunDirectoryError
from hpctrain.launch.prepare import changed_config, claim_default_path, plan, prepare

COMMAND = ["python", "-m", "hpctrain"]


@pytest.fixture(scope="module")
def composer():
    return Composer()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_new_run_has_its_configuration_and_its_manifest(composer, folder):
    directory = prepare(composer.compose(["optimizer.lr=0.5", "run_dir=R"]), COMMAND).directory
    assert directory.path == folder / "R"
    assert load(directory.config).optimizer["lr"] == 0.5
    manifest = json.loads(directory.manifest.read_text())
    assert manifest["command"] == "python -m hpctrain"
    assert manifest["versions"]["torch"]
    assert directory.path.stat().st_mode & 0o777 == 0o750


def test_the_environment_is_not_recorded(composer, folder, monkeypatch):
    monkeypatch.setenv("MY_SECRET_TOKEN", "hunter2-hunter2")
    directory = prepare(composer.compose(["run_dir=R"]), COMMAND).directory
    written = b"".join(path.read_bytes() for path in directory.path.rglob("*") if path.is_file())
    assert b"hunter2" not in written


def test_run_mode_is_the_directorys(composer, folder):
    directory = prepare(composer.compose(["run_dir=R", "run_mode=0700"]), COMMAND).directory
    assert directory.path.stat().st_mode & 0o777 == 0o700


def test_a_plan_has_the_resources_and_writes_nothing(composer, folder):
    run = plan(composer.compose(["cluster=slurm", "nodes=4", "cluster.gpus_per_node=2", "name=mine"]))
    resources = (run.resources.num_nodes, run.resources.processes_per_node, run.resources.world_size)
    assert resources == (4, 2, 8)
    assert run.directory.path.parent == folder / "runs" / "mine"
    assert run.config.run_dir == str(run.directory.path)
    assert list(folder.iterdir()) == []


def test_preparing_leaves_the_given_configuration_as_it_is(composer, folder):
    (folder / "W.pt").write_bytes(b"PK\x03\x04")
    composed = composer.compose(["resume.allow_config_change=true"])
    config = dataclasses.replace(composed, init_from="W.pt")  # as `resume RUN init_from=W.pt` has it
    run = prepare(config, COMMAND)
    assert (config.run_dir, config.init_from, config.resume.allow_config_change) == (None, "W.pt", True)
    assert (run.config.init_from, run.config.resume.allow_config_change) == (str(folder / "W.pt"), False)
    assert run.config == load(run.directory.config)


def test_two_runs_of_one_second_have_two_directories(folder):
    paths = {claim_default_path("digits") for _ in range(5)}
    assert len(paths) == 5
    assert all(path.is_dir() and path.parent.name == "digits" for path in paths)


def test_the_same_configuration_opens_the_same_run(composer, folder):
    first = prepare(composer.compose(["run_dir=R"]), COMMAND).directory
    first.metrics.write_text("{}\n")
    again = prepare(composer.compose(["run_dir=R", "trainer.max_steps=99", "nodes=1"]), ["other"]).directory
    assert again == first
    assert first.metrics.exists()
    assert load(first.config).trainer.max_steps == 99
    assert json.loads(first.manifest.read_text())["command"] == "python -m hpctrain"


def test_what_decides_the_weights_may_not_change(composer, folder):
    prepare(composer.compose(["run_dir=R"]), COMMAND)
    with pytest.raises(ConfigError, match=r"optimizer\.lr=0\.5.*weights depend on it.*allow_config_change"):
        prepare(composer.compose(["run_dir=R", "optimizer.lr=0.5"]), COMMAND)


def test_all_that_may_not_change_is_named(composer, folder, capsys):
    prepare(composer.compose(["run_dir=R"]), COMMAND)
    with pytest.raises(ConfigError, match=r"optimizer\.lr=0\.5: .*they also depend on seed;"):
        prepare(composer.compose(["run_dir=R", "optimizer.lr=0.5", "seed=3", "trainer.max_epochs=9"]), COMMAND)
    assert capsys.readouterr().out == ""


def test_unless_the_user_allows_it_and_what_changed_is_printed(composer, folder, capsys):
    prepare(composer.compose(["run_dir=R"]), COMMAND)
    words = ["run_dir=R", "seed=3", "checkpoint.keep=5", "resume.allow_config_change=true"]
    prepare(composer.compose(words), COMMAND)
    assert capsys.readouterr().out.splitlines() == [
        "the run continues with checkpoint.keep=5 instead of 2",
        "the run continues with seed=3 instead of 0; the run is no longer exact",
    ]


def test_a_folder_with_other_files_is_left_alone(composer, folder):
    (folder / "R").mkdir()
    (folder / "R" / "thesis.tex").write_text("x")
    with pytest.raises(RunDirectoryError, match="other files"):
        prepare(composer.compose(["run_dir=R"]), COMMAND)
    assert [path.name for path in (folder / "R").iterdir()] == ["thesis.tex"]


def test_a_place_that_cannot_be_written(composer, folder):
    config = composer.compose(["run_dir=file/R"])
    (folder / "file").write_text("x")
    with pytest.raises(RunDirectoryError, match="can't be created"):
        prepare(config, COMMAND)


def test_a_resume_takes_values_and_groups(composer, folder):
    directory = prepare(composer.compose(["run_dir=R", "optimizer.lr=0.5", "trainer.max_epochs=7"]), COMMAND).directory
    config = changed_config(directory, ["trainer.max_steps=5", "cluster=slurm", "nodes=2", "cluster.partition=p"], None)
    assert (config.optimizer["lr"], config.trainer.max_steps, config.trainer.max_epochs) == (0.5, 5, 7)
    assert (config.cluster.kind, config.cluster.partition, config.nodes) == ("slurm", "p", 2)


def test_a_resume_takes_the_groups_whose_keys_belong_to_a_class(composer, folder):
    directory = prepare(composer.compose(["run_dir=R", "optimizer.lr=0.5", "seed=3"]), COMMAND).directory
    config = changed_config(directory, ["optimizer=sgd", "optimizer.lr=0.2"], None)
    assert (config.optimizer["_target_"], config.optimizer["lr"], config.seed) == ("torch.optim.SGD", 0.2, 3)
    config = changed_config(directory, ["task=text", "model=gpt", "model.num_layers=3"], None)
    assert (config.task["_target_"], config.model["num_layers"]) == ("hpctrain.tasks.text.Text", 3)
    assert config.optimizer["lr"] == 0.5
    with pytest.raises(ConfigError, match="optimizer=sg: is not an option"):
        changed_config(directory, ["optimizer=sg"], None)


def test_a_resume_with_an_unknown_key(composer, folder):
    directory = prepare(composer.compose(["run_dir=R"]), COMMAND).directory
    with pytest.raises(ConfigError, match=r"trainer\.max_step=5: is not a known key"):
        changed_config(directory, ["trainer.max_step=5"], None)


@pytest.mark.parametrize(
    ("override", "error"),
    [
        ("trainer.max_step=5", "trainer.max_step=5: is not a known key; did you mean trainer.max_steps?"),
        ("seeed=5", "did you mean seed?"),
        ("seed=1,2", "seed=1,2: has several values; write seed="),
        ("name=a,b", "has several values; write name="),
        ("trainer.max_steps=[1", "cannot be parsed as KEY=VALUE"),
        ("~seed", "~seed=null: is required"),
        ("cluster.kind=slurm", "is set by the option"),
    ],
)
def test_a_resume_explains_mistakes_as_a_training_does(composer, folder, override, error):
    directory = prepare(composer.compose(["run_dir=R"]), COMMAND).directory
    with pytest.raises(ConfigError, match=re.escape(error)):
        changed_config(directory, [override], None)


def test_a_resume_adds_and_removes_keys_of_a_class(composer, folder):
    directory = prepare(composer.compose(["run_dir=R"]), COMMAND).directory
    config = changed_config(directory, ["+optimizer.amsgrad=true", "~optimizer.eps", "cluster.env.A=1"], None)
    assert config.optimizer["amsgrad"] is True
    assert "eps" not in config.optimizer
    assert config.cluster.env == {"A": "1"}
