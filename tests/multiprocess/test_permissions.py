"""Who may read, write and resume a run: its mode decides, whatever the umask."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from pathlib import Path

import pytest
from other_user import GROUP

NOBODY, DAEMON = 65_534, 1
SHORT = ("model=convnet", "model.width=1", "checkpoint.every_steps=1")
ROOT = 0

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def shared():
    """A folder of a group, with the setgid bit."""
    folder = Path(tempfile.mkdtemp())  # pytest's own folders are closed to other users
    os.chown(folder, 0, GROUP)
    folder.chmod(0o2770)
    yield folder
    shutil.rmtree(folder)


def too_open(folder, beyond):
    paths = [folder, *folder.rglob("*")]
    return [str(path) for path in paths if stat.S_IMODE(path.stat().st_mode) & beyond]


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_a_generous_umask_opens_nothing(fork_server, shared, size):
    words = (*SHORT, f"run_dir={shared}/R", "trainer.max_steps=2", f"cluster.processes_per_node={size}")
    words += ("trainer.profile=[1,1]",)
    (done,) = fork_server.wait(fork_server.start("other_user:run", ROOT, 0o002, *words, folder=shared))
    assert done.code == 0, done.output
    assert too_open(shared / "R", 0o027) == []
    assert stat.S_IMODE((shared / "R").stat().st_mode) == 0o2750


def test_a_second_user_of_the_group_resumes(fork_server, shared):
    words = ("task=custom", "task._target_=noting.Noting", "logger.every_steps=1", "logger.csv=true")
    words += ("logger.tensorboard=false",)
    words += (f"run_dir={shared}/R", "trainer.max_steps=2", "run_mode='2770'", "trainer.global_batch_size=4")
    (done,) = fork_server.wait(fork_server.start("other_user:run", NOBODY, 0o077, *words, folder=shared))
    assert done.code == 0, done.output
    run = shared / "R"
    assert stat.S_IMODE(run.stat().st_mode) == 0o2770
    more = ("resume", str(run), "trainer.max_steps=5")
    (done,) = fork_server.wait(fork_server.start("other_user:run", DAEMON, 0o022, *more, folder=shared))
    assert done.code == 0, done.output
    assert (run / "config.yaml").stat().st_uid == DAEMON
    assert {path.stat().st_gid for path in [run, *run.rglob("*")]} == {GROUP}
    assert {path.suffix for path in run.glob("media/*/*")} == {".json", ".png", ".txt", ".wav"}
    closed = [str(path) for path in [run, *run.rglob("*")] if not path.stat().st_mode & stat.S_IWGRP]
    assert closed == []


def test_a_sweeps_folder_is_covered(fork_server, shared):
    words = ("-m", *SHORT, "run_dir=S", "trainer.max_steps=1", "seed=1,2")
    (done,) = fork_server.wait(fork_server.start("other_user:run", ROOT, 0o002, *words, folder=shared))
    assert done.code == 0, done.output
    assert too_open(shared / "S", 0o027) == []
