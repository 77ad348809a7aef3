import dataclasses
import json

import pytest

from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.config.stored import load
from hpctrain.errors import ConfigError, RunDirectoryError
from hpctrain.launch.prepare import plan, prepare, prepare_as_rank
from hpctrain.run.ledger import Ledger
from hpctrain.run.saved_record import may_start_over

COMMAND = ["python", "-m", "hpctrain"]


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
    composed = composer.compose(["resume.allow_config_change=true", "run_dir=R"])
    config = dataclasses.replace(composed, init_from="W.pt")  # as `resume RUN init_from=W.pt` has it
    run = prepare(config, COMMAND)
    assert (config.run_dir, config.init_from, config.resume.allow_config_change) == ("R", "W.pt", True)
    assert (run.config.init_from, run.config.resume.allow_config_change) == (str(folder / "W.pt"), False)
    assert run.config == load(run.directory.config)


def test_the_same_configuration_opens_the_same_run(composer, folder):
    first = prepare(composer.compose(["run_dir=R"]), COMMAND).directory
    first.metrics.write_text("{}\n")
    again = prepare(composer.compose(["run_dir=R", "trainer.max_steps=99", "nodes=1"]), ["other"]).directory
    assert again == first
    assert first.metrics.exists()
    assert load(first.config).trainer.max_steps == 99
    assert json.loads(first.manifest.read_text())["command"] == "python -m hpctrain"


@pytest.mark.parametrize("restart_count", [0, 1])
def test_a_requeue_does_not_start_over_though_it_repeats_the_words(composer, folder, restart_count):
    config = composer.compose(["run_dir=R", "resume.from_scratch=true"])
    environment = dataclasses.replace(ClusterEnvironment.from_environment({}), restart_count=restart_count)
    directory = prepare_as_rank(config, COMMAND, environment).directory
    Ledger(directory).claim()
    prepare_as_rank(config, COMMAND, environment)
    assert may_start_over(directory) is (restart_count == 0)


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
