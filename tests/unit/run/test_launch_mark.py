from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hpctrain.errors import RunDirectoryError
from hpctrain.run.directory import RunDirectory
from hpctrain.run.launch_mark import LaunchMark

COMMAND = ["python", "-m", "hpctrain", "seed=1"]


@pytest.fixture
def mark(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return LaunchMark(RunDirectory.at("R"))


def test_the_mark_lasts_as_long_as_the_launch(mark):
    assert not mark.is_unfinished
    with mark.held(COMMAND):
        assert mark.is_unfinished
        with pytest.raises(RunDirectoryError, match=r"another command is launching a run there.*status"), mark.held([]):
            pass
        mark.directory.config.touch()
        assert not mark.is_unfinished
    assert list(mark.directory.path.iterdir()) == [mark.directory.config]


def test_an_error_removes_the_mark_and_leaves_that_of_an_earlier_launch(mark):
    for expected in (False, True):
        with pytest.raises(KeyboardInterrupt), mark.held(COMMAND):
            raise KeyboardInterrupt
        assert mark.directory.launching.exists() is expected
        mark.directory.launching.touch()


def killed(mark, lines=""):
    """A launch that is killed."""
    code = (
        "import os, sys\nfrom hpctrain.run.launch_mark import *\n"
        f"with LaunchMark(RunDirectory.at('R')).held({COMMAND}):\n    {lines}\n    os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9


def test_what_to_type_after_a_launch_that_was_killed(mark, tmp_path):
    killed(mark, "(RunDirectory.at('R').path / '.tmp-config.yaml-1').touch()")
    typed = f"type `python -m hpctrain seed=1` with run_dir={tmp_path}/R in {tmp_path}"
    assert mark.describe_unfinished().endswith(f"was killed before it was complete; to continue it, {typed}")
    with mark.held(COMMAND):
        assert [path.name for path in mark.directory.path.iterdir()] == ["launching.json"]
    assert mark.describe_unfinished() == ""


def test_a_requeued_job_takes_the_mark_of_its_earlier_start(mark):
    with mark.held(COMMAND), mark.held(COMMAND, requeued=True):
        pass


def test_runs_of_a_sweep_are_marked_by_its_folder(mark):
    run = LaunchMark(RunDirectory(mark.directory.path / "0"))
    with mark.held(COMMAND):
        assert run.is_unfinished
        run.directory.attempt(1).mkdir(parents=True)
        assert not run.is_unfinished


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_command_of_another_user_is_not_shown(mark):
    killed(mark)
    os.chown(mark.directory.launching, 65_534, 65_534)
    assert mark.describe_unfinished().endswith("to continue it, type its command again")


@pytest.mark.parametrize("content", ['{"version": "0.2.0"}', "[]", "\x7fELF"])
def test_a_file_of_the_user_with_the_name_of_the_mark_stays(mark, content):
    mark.directory.path.mkdir()
    mark.directory.launching.write_text(content)
    assert not mark.is_unfinished
    assert mark.describe_unfinished() == ""
    with pytest.raises(RunDirectoryError, match=r"R: launching\.json there is not a file of hpctrain"), mark.held([]):
        pass
    assert mark.directory.launching.read_text() == content


def link_to_an_empty_file(path):
    (path.parent / "empty").touch()
    path.symlink_to("empty")


@pytest.mark.parametrize(
    "make", [os.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/null"), link_to_an_empty_file]
)
def test_nothing_but_a_file_is_a_mark(mark, make):
    mark.directory.path.mkdir()
    make(mark.directory.launching)
    assert not mark.is_unfinished
    with pytest.raises(RunDirectoryError, match=r"launching\.json there is not a file of hpctrain"), mark.held([]):
        pass


@pytest.mark.parametrize("content", ["", '{"comm', '{"command": ["python"], "fol'])
def test_a_mark_that_a_full_disk_cut_off_is_one(mark, content):
    mark.directory.path.mkdir()
    mark.directory.launching.write_text(content)
    assert mark.is_unfinished
    assert mark.describe_unfinished().endswith("to continue it, type its command again")
    with mark.held(COMMAND):
        pass
    assert not mark.directory.launching.exists()


def test_a_numbered_folder_of_the_user_in_that_of_a_sweep_is_none_of_its_runs(mark):
    killed(mark)
    (mark.directory.path / "7").mkdir()
    run = LaunchMark(RunDirectory(mark.directory.path / "7"))
    assert run.is_unfinished
    (run.directory.path / "notes.txt").touch()
    assert not run.is_unfinished


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_member_of_the_group_continues_in_a_sticky_folder(monkeypatch):
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o1777)
        monkeypatch.chdir(folder)
        mark = LaunchMark(RunDirectory.at("."))
        mark.directory.launching.write_text('{"command": ')
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                os.setresuid(65_534, 65_534, 65_534)
                with mark.held(COMMAND):
                    mark.directory.config.touch()
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert not mark.is_unfinished
