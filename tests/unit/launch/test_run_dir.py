from __future__ import annotations

import stat

import pytest

from hpctrain.errors import RunDirectoryError
from hpctrain.launch.prepare import claim_default_path, rollback_on_error
from hpctrain.run.directory import RunDirectory
from hpctrain.run.job_records import JobRecords
from hpctrain.run.launch_mark import LaunchMark


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_two_runs_of_one_second_have_two_directories():
    paths = {claim_default_path("digits") for _ in range(5)}
    assert len(paths) == 5
    assert all(path.is_dir() and path.parent.name == "digits" for path in paths)


def launched(run_dir, *others):
    """Writes what a launch writes, and files of others, and is interrupted."""
    with rollback_on_error(run_dir, "mine") as directory:
        directory.create(0o700)
        directory.submitit.mkdir()
        for file in (directory.config, directory.config_before, directory.manifest, directory.jobs):
            file.touch()
        for other in others:
            (directory.path / other).write_text("x")
        raise KeyboardInterrupt


@pytest.mark.parametrize("run_dir", [None, "deep/er/run"])
def test_a_new_directory_and_its_parents_are_removed(folder, run_dir):
    with pytest.raises(KeyboardInterrupt):
        launched(run_dir)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("path", ["runs", "runs/mine"])
def test_a_parent_that_was_there_stays(folder, path):
    (folder / path).mkdir(parents=True)
    with pytest.raises(KeyboardInterrupt):
        launched(None)
    assert list(folder.rglob("*")) == [folder / "runs", folder / "runs" / "mine"][: path.count("/") + 1]


@pytest.mark.parametrize("linked", [False, True])
def test_an_empty_folder_of_the_user_stays_with_its_mode(folder, linked):
    (folder / "real").mkdir(mode=0o711)
    if linked:
        (folder / "out").symlink_to("real")
    with pytest.raises(KeyboardInterrupt):
        launched("out" if linked else "real")
    assert list((folder / "real").iterdir()) == []
    assert stat.S_IMODE((folder / "real").stat().st_mode) == 0o711
    assert (folder / "out").is_symlink() == linked


@pytest.mark.parametrize("run_dir", [None, "out"])
def test_files_of_others_stay(folder, run_dir):
    with pytest.raises(KeyboardInterrupt):
        launched(run_dir, "thesis.tex")
    assert [path.name for path in folder.rglob("*") if path.is_file()] == ["thesis.tex"]


@pytest.mark.parametrize(
    "begin", [lambda run: JobRecords(run).add({"job_id": "7", "time": 1.0}), lambda run: run.attempt(1).mkdir()]
)
def test_a_run_with_a_job_or_an_attempt_is_not_undone(directory, begin):
    def launched():
        with rollback_on_error(directory.path):
            directory.config.write_text("lr: 2\n")
            begin(directory)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launched()
    assert directory.config.read_text() == "lr: 2\n"


def test_a_refused_command_leaves_what_the_launch_that_is_under_way_there_writes(folder):
    home = RunDirectory.at("S")

    def refused():
        with rollback_on_error("S"):
            home.code_records.write_text("{}\n")  # by the other launch
            with rollback_on_error("S", command=["two"]):
                pass

    with LaunchMark(home).held(["one"]):
        with pytest.raises(RunDirectoryError, match="another command is launching a run there"):
            refused()
        assert home.code_records.exists()
