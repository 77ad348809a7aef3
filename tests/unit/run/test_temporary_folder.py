from __future__ import annotations

import os

import pytest

from hpctrain.run.temporary_folder import LOCKED_AFTER_S, first_part, remove_abandoned, temporary_folder

# the last is in a TMPDIR that machines share; they don't see each other's locks of it
FOREIGN = [
    "hpctrain-results",
    f"{first_part()}session-mine",
    f"{first_part()}session-abcd_12x.bak",
    "hpctrain-0f0f0f0f-session-abcd_12x",
]


def make_old(path):
    os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 2 * LOCKED_AFTER_S))


def test_the_folder_is_private_and_removed(tmp_path):
    with temporary_folder("session", str(tmp_path)) as folder:
        (folder / "events").touch()
        assert folder.stat().st_mode & 0o777 == 0o700
        make_old(folder)
        remove_abandoned(str(tmp_path))
        assert (folder / "events").exists()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [f"{first_part()}session-abcd_12x", f"{first_part()}0123456789abcdef"])
def test_those_of_killed_processes_are_removed(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "events").touch()
    remove_abandoned(str(tmp_path))
    assert (tmp_path / name).exists(), "its process may not have locked it yet"
    make_old(tmp_path / name)
    with temporary_folder("session", str(tmp_path)):
        assert not (tmp_path / name).exists()


@pytest.mark.parametrize("name", FOREIGN)
def test_folders_of_the_user_and_of_other_machines_stay(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / "target").mkdir()
    (tmp_path / f"{first_part()}session-abcd_12x").symlink_to("target")
    make_old(tmp_path / name)
    make_old(tmp_path / "target")
    remove_abandoned(str(tmp_path))
    assert len(list(tmp_path.iterdir())) == 3
