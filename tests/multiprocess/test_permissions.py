"""Who may read, write and resume a run: its mode decides, whatever the umask."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from pathlib import Path

import pytest

from tests.multiprocess.programs.other_user import GROUP

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
    words = (
        "task=custom",
        "task._target_=tests.multiprocess.programs.noting.Noting",
        "logger.every_steps=1",
        "logger.csv=true",
    )
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


TREES = {
    "run": ["run_dir=H", *SHORT],
    "program": ["run", "run_dir=H", "--", "python", "train.py"],
    "sweep": ["-m", "run_dir=H", "seed=1,2", *SHORT],
    "array": ["-m", "cluster=slurm", "run_dir=H", "seed=1,2", *SHORT],
    "search": ["-m", "run_dir=H", "seed=1,2", "sweep=asha", "sweep.min_steps=1", *SHORT],
    "array of a search": ["-m", "cluster=slurm", "run_dir=H", "seed=1,2", "sweep=asha", "sweep.min_steps=1", *SHORT],
    "programs": ["run", "-m", "run_dir=H", "args.x=1,2", "--", "python", "train.py", "{args.x}"],
}
LATER = [["resume", "H", "trainer.max_steps=3"], ["report", "H"], ["cancel", "H"]]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("umask", "mode", "existing"),
    [(0, "700", False), (0, "750", False), (0, "750", True), (0, "2770", False), (0o077, "2770", False)],
)
@pytest.mark.parametrize("kind", TREES)
def test_all_that_is_ever_written_has_the_runs_mode(fork_server, shared, kind, umask, mode, existing):
    """Also in the folder of a sweep that was there before, and that everyone may write to."""
    home = shared / "H"
    (shared / "train.py").write_text("open('out', 'w')")
    (shared / "sbatch").write_text("#!/bin/sh\necho Submitted batch job 78\n")
    (shared / "sbatch").chmod(0o755)
    if existing and "-m" not in TREES[kind]:
        pytest.skip("a run needs a new folder")
    if existing:
        home.mkdir()
        home.chmod(0o1777)
        (home / "older").touch()
    words = TREES[kind]
    place = words.index("run_dir=H")
    first = [*words[:place], f"run_mode='{mode}'", "trainer.max_steps=2", *words[place:]]
    first = [word for word in first if "run" not in words or not word.startswith("trainer.")]
    later = LATER[1:] if "cluster=slurm" in words or "run" in words else LATER
    path = f"{shared}:{os.environ['PATH']}"
    for command in (first, *later):  # there are no tasks to cancel, and a search doesn't train longer
        (done,) = fork_server.wait(fork_server.start("other_user:run", ROOT, umask, *command, folder=shared, PATH=path))
        assert done.code == 0 or command in later, done.output
    paths = [path for path in [home, *home.rglob("*")] if not path.is_symlink()]
    written = [path for path in paths if path.name != "older" and not (existing and path == home)]
    modes = {str(path): stat.S_IMODE(path.stat().st_mode) for path in written}
    allowed = int(mode, 8)
    assert {name: oct(found) for name, found in modes.items() if found & 0o777 & ~allowed} == {}
    if mode == "2770":  # the copy of the code is read-only
        closed = [name for name, found in modes.items() if not found & stat.S_IWGRP and "/code/" not in name]
        assert closed == []


def test_a_sweeps_folder_is_covered(fork_server, shared):
    words = ("-m", *SHORT, "run_dir=S", "trainer.max_steps=1", "seed=1,2")
    (done,) = fork_server.wait(fork_server.start("other_user:run", ROOT, 0o002, *words, folder=shared))
    assert done.code == 0, done.output
    assert too_open(shared / "S", 0o027) == []
