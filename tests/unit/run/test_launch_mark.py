from __future__ import annotations

import os
import subprocess
import sys

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
        with pytest.raises(RunDirectoryError, match=r"R: another command launches a run there.*status"), mark.held([]):
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
    assert mark.describe_unfinished().endswith(f"was killed before it was complete; to repeat it, {typed}")
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
        run.directory.claim(1).mkdir(parents=True)
        assert not run.is_unfinished


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_command_of_another_user_is_not_shown(mark):
    killed(mark)
    os.chown(mark.directory.launching, 65_534, 65_534)
    assert mark.describe_unfinished().endswith("to repeat it, type its command again")
