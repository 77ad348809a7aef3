from __future__ import annotations

import os
import stat

import pytest

from hpctrain.errors import ExitCode, RunDirectoryError
from hpctrain.run.checkpoint_manifest import MANIFEST
from hpctrain.run.checkpoints import saved_step
from hpctrain.run.directory import RunDirectory
from hpctrain.run.job_records import JobRecords
from tests.unit.fakes import manifest


@pytest.fixture
def directory(tmp_path):
    directory = RunDirectory.at(tmp_path / "runs" / "digits")
    directory.create(0o750)
    return directory


def test_every_path_is_where_the_reference_puts_it(tmp_path):
    directory = RunDirectory(tmp_path)
    paths = {
        directory.config: "config.yaml",
        directory.manifest: "manifest.json",
        directory.attempts: "attempts.jsonl",
        directory.metrics: "metrics.jsonl",
        directory.jobs: "jobs.jsonl",
        directory.checkpoint(100): "checkpoints/step_00000100",
        directory.tensorboard: "tensorboard",
        directory.rank_log(3): "logs/rank_3.log",
        directory.attempt(2): "attempts/0002",
    }
    assert {str(path.relative_to(tmp_path)): name for path, name in paths.items()} == {
        name: name for name in paths.values()
    }


def test_a_relative_path_is_taken_from_here_and_a_link_is_kept(tmp_path, monkeypatch):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "link").symlink_to("scratch")
    monkeypatch.chdir(tmp_path)
    assert RunDirectory.at("link/../link/run").path == tmp_path / "link" / "run"


def test_the_run_gets_its_mode_whatever_the_umask(tmp_path):
    before = os.umask(0o077)
    try:
        directory = RunDirectory.at(tmp_path / "runs" / "digits")
        directory.create(0o755)
    finally:
        os.umask(before)
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o755
    assert stat.S_IMODE(directory.path.parent.stat().st_mode) == 0o700
    assert directory.logs.is_dir()


def test_the_setgid_bit_of_a_shared_folder_is_kept(tmp_path):
    tmp_path.chmod(0o2770)
    directory = RunDirectory.at(tmp_path / "digits")
    directory.create(0o750)
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o2750
    assert stat.S_IMODE(directory.checkpoints.stat().st_mode) == 0o2750


@pytest.mark.parametrize("umask", [0o002, 0o077])
def test_what_is_created_has_the_runs_permissions_whatever_the_umask(tmp_path, umask):
    directory = RunDirectory.at(tmp_path / "digits")
    before = os.umask(umask)
    try:
        directory.create(0o2770)
        JobRecords(directory).add({"job_id": "7"})
        with directory.permissions():
            directory.metrics.touch()
        assert os.umask(umask) == umask
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (directory.jobs, directory.metrics, directory.logs)]
    assert modes == [0o660, 0o660, 0o2770]


def test_a_sweeps_directory_has_a_mode_and_a_folder_with_other_files_keeps_its_own(tmp_path):
    home = RunDirectory.at(tmp_path / "sweep")
    home.create_for_sweep(0o700)
    assert stat.S_IMODE(home.path.stat().st_mode) == 0o700
    tmp_path.chmod(0o755)
    RunDirectory.at(tmp_path).create_for_sweep(0o700)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_creating_twice_keeps_what_is_there(directory):
    directory.config.write_text("seed: 0\n")
    directory.create(0o700)
    assert directory.config.read_text() == "seed: 0\n"
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700


def test_a_place_that_cannot_hold_a_run(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunDirectoryError, match=r"run_dir=.*file/run: can't be created \(Not a directory\)") as raised:
        RunDirectory.at(tmp_path / "file" / "run").create(0o750)
    assert raised.value.exit_code == ExitCode.BAD_CONFIGURATION


def test_only_a_directory_with_a_config_is_a_run(directory, tmp_path):
    with pytest.raises(RunDirectoryError, match=r"it has no config\.yaml"):
        RunDirectory.existing(directory.path)
    with pytest.raises(RunDirectoryError, match="no such directory"):
        RunDirectory.existing(tmp_path / "absent")
    directory.config.touch()
    assert RunDirectory.existing(directory.path) == directory


def test_published_checkpoints_are_found_by_step(directory):
    assert directory.checkpoint_steps() == []
    for name in ("step_00000100", "step_00000020", "step_123456789", ".tmp-step_00000030-ab12", "step_7", "best"):
        (directory.checkpoints / name).mkdir()
    assert directory.checkpoint_steps() == [20, 100, 123456789]
    assert saved_step(directory) == 0
    for step in (20, 100):
        (directory.checkpoint(step) / MANIFEST).write_bytes(manifest(step))
    assert saved_step(directory) == 100


def test_no_checkpoints_folder_is_no_checkpoint(tmp_path):
    assert RunDirectory(tmp_path).checkpoint_steps() == []
    RunDirectory(tmp_path).checkpoints.write_text("no folder")
    assert RunDirectory(tmp_path).checkpoint_steps() == []
    assert saved_step(RunDirectory(tmp_path)) == 0


def test_checkpoints_that_were_set_aside_are_no_steps(directory):
    aside = ["damaged-step_00000240-0123abcd", "damaged-step_123456789-0123abcd"]
    for name in (*reversed(aside), "damaged-step_240-0123abcd", "damaged-step_00000240", "step_00000200"):
        (directory.checkpoints / name).mkdir()
    assert [path.name for path in directory.set_aside()] == aside
    assert directory.checkpoint_steps() == [200]


@pytest.mark.parametrize(
    ("mode", "folder", "file"), [(0o700, 0o700, 0o600), (0o750, 0o750, 0o640), (0o2770, 0o770, 0o660)]
)
def test_the_folder_of_a_sweep_that_was_open_before_gets_files_with_the_mode_of_the_runs(tmp_path, mode, folder, file):
    home = RunDirectory.at(tmp_path)
    home.path.chmod(0o1777)
    with home.permissions(mode):
        home.sweep.touch()
    with home.permissions():
        (home.path / "search").mkdir()
        home.jobs.touch()
    found = [stat.S_IMODE(path.stat().st_mode) for path in (home.path / "search", home.jobs)]
    assert found == [folder, file]


def test_a_file_system_that_fails_is_no_missing_file(tmp_path):
    """Python's own look-ups say so since 3.14."""
    directory = RunDirectory.at(tmp_path)
    assert [directory.config.exists(), directory.claims.is_dir(), directory.metrics.is_file()] == [False] * 3
    directory.claims.symlink_to("x" * 300)
    assert directory.claims.is_symlink()
    for look in ("exists", "is_dir", "is_file"):
        for path in (directory.claims, directory.attempt(1), directory.path / "attempts" / "1"):
            with pytest.raises(OSError, match="too long"):
                getattr(path, look)()
