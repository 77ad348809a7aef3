"""Room for checkpoints: what is needed and free, and what can be removed."""

from __future__ import annotations

import errno
import os

import pytest

from hpctrain.checkpoint.retention import (
    KEEP_FEWER,
    Removable,
    describe_disk_space,
    describe_shortage,
    explain_full,
    is_full,
    removable_folders,
)
from hpctrain.config.checkpoint import Checkpoint
from hpctrain.errors import CheckpointError
from hpctrain.files import write_json
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason
from tests.support.full_disk import small_disk
from tests.unit.fakes import manifest

TOO_MUCH = 10**16
FULL_DISK = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def save(directory, step, size=1000):
    """A checkpoint of about this size; its manifest doesn't know the file, as if a user had added it."""
    path = directory.checkpoint(step)
    path.mkdir(parents=True)
    (path / "manifest.json").write_bytes(manifest(step))
    (path / "ballast").write_bytes(bytes(size))


def paths(directory):
    return [one.path for one in removable_folders(directory)]


def test_where_there_is_room_nothing_is_said(directory):
    assert describe_shortage(directory, 10, 1000, Checkpoint()) == ""


def test_how_much_is_needed_and_free(directory):
    found = describe_shortage(directory, 10, TOO_MUCH, Checkpoint(keep=3, keep_best=1))
    assert found.startswith(f"{directory.checkpoints}: ")
    why = "(checkpoint.keep=3, checkpoint.keep_best=1 and one while it is written)"
    assert f"B are free, but 50 PB are needed: 5 more checkpoints of 5 files and 10 PB {why}; " in found
    assert "the checkpoint of step 10 will not fit" in found
    assert KEEP_FEWER in found


def test_what_a_run_and_its_sweep_take_is_described(tmp_path):
    sweep = tmp_path / "sweep"
    directory = RunDirectory.at(sweep / "0")
    directory.create(0o750)
    found = describe_disk_space(directory, 1000, Checkpoint(keep=3, keep_best=1, keep_every=5))
    assert found.startswith("at most 5 x 1 kB = 5 kB, 1 kB of it for the best; ")
    assert found.endswith(" are free; those of checkpoint.keep_every come on top")
    (sweep / "1").mkdir()
    write_json(RunDirectory.at(sweep).sweep, {"num_runs": None})
    assert "= 4 kB, 1 kB of it for the best; 8 kB for the 2 runs of the sweep; " in describe_disk_space(
        directory, 1000, Checkpoint(keep_best=1)
    )
    write_json(RunDirectory.at(sweep).sweep, {"num_runs": 10})
    assert "= 3 kB; 30 kB for the 10 runs of the sweep; " in describe_disk_space(
        directory, 1000, Checkpoint(keep_best=0)
    )


def test_checkpoints_that_exist_are_not_needed_twice(directory):
    for step in (1, 2):
        save(directory, step)
    assert "are needed: a checkpoint of 3 files and 10 PB (" in describe_shortage(directory, 10, TOO_MUCH, Checkpoint())


def test_one_that_fits_is_known_from_one_that_doesn_t(directory):
    system = os.statvfs(directory.path)
    free = system.f_bavail * system.f_frsize
    assert "the checkpoint of step 10 still fits" in describe_shortage(directory, 10, free // 2, Checkpoint())


def test_a_folder_that_is_gone_is_no_error(directory):
    directory.checkpoints.rmdir()
    assert describe_shortage(directory, 10, TOO_MUCH, Checkpoint()) == ""


def test_what_can_be_removed_of_a_run_the_largest_first(directory):
    for step, size in ((1, 1000), (2, 5000), (3, 3000), (4, 9000), (5, 9000)):
        save(directory, step, size)
    aside = directory.checkpoints / "damaged-step_00000000-0123abcd"
    aside.mkdir()
    (aside / "model.pt").write_bytes(bytes(4000))
    assert paths(directory) == [directory.checkpoint(2), aside, directory.checkpoint(3), directory.checkpoint(1)]
    assert removable_folders(directory)[1] == Removable(aside, 4000)


def test_the_newest_two_that_are_intact_stay(directory):
    for step in (1, 2, 3):
        save(directory, step)
    (directory.checkpoint(3) / "manifest.json").unlink()
    assert paths(directory) == []


def test_completed_runs_of_the_sweep(tmp_path):
    runs = [RunDirectory.at(tmp_path / str(number)) for number in range(4)]
    for run in runs:
        run.create(0o750)
        run.config.write_text("")
        save(run, 1, 1000 + 1000 * int(run.path.name))
    for run, reason in zip(runs, (Reason.FAILED, Reason.COMPLETED, Reason.PAUSED, Reason.COMPLETED), strict=True):
        ledger = Ledger(run)
        ledger.start(ledger.claim(), job_id=None, nodes=["n1"], world_size=1, step=0)
        ledger.end(1, reason=reason, step=1)
    assert paths(runs[0]) == [], "without sweep.json, they are no sweep"
    write_json(RunDirectory(tmp_path).sweep, {})
    assert paths(runs[0]) == [runs[3].checkpoints, runs[1].checkpoints]
    assert paths(runs[3]) == [runs[1].checkpoints]


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (FULL_DISK, True),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), True),
        (CheckpointError("rank 1: No space left on device"), True),
        (OSError(errno.EROFS, os.strerror(errno.EROFS)), False),
        (CheckpointError("model.pt: a value can't be stored"), False),
    ],
)
def test_errors_of_a_full_disk(error, full):
    assert is_full(error) == full


def test_after_a_full_disk(directory):
    for step in (1, 2, 3):
        save(directory, step)
    found = explain_full(directory, FULL_DISK)
    assert "B are free; older checkpoints, the largest first, of which you may remove what you don't need: " in found
    assert f"{directory.checkpoint(1)} (1." in found
    assert "your quota" not in found


def test_a_quota_has_a_command(directory):
    found = explain_full(directory, OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)))
    assert found.startswith("your quota of bytes or of files on ")
    assert "` shows both; without the new checkpoint, " in found
    assert "no older checkpoint of the run can be removed: remove other files" in found


def test_files_may_be_what_is_missing(directory):
    with small_disk(directory.checkpoints, "size=8m,nr_inodes=8"):
        found = describe_shortage(directory, 10, 1000, Checkpoint())
        assert "MB are free, but only 7 more files (inodes) can be created; 15 files are needed: 3 more " in found
        assert "checkpoints of 5 files and 1 kB (" in found
        assert "the checkpoint of step 10 still fits" in found
        save(directory, 1)
        assert "4 more files (inodes) can be created; 6 files are needed: " in describe_shortage(
            directory, 10, 1000, Checkpoint()
        )
