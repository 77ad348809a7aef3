from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from hpctrain.errors import RendezvousError
from hpctrain.rank.private_folder import open_private_file, private_folder

NOBODY = 65_534


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "meeting"


def test_the_file_is_shared_until_the_end_and_stays_usable_after_it(path: Path) -> None:
    assert open_private_file(path) is None
    with private_folder(path) as made:
        opened = open_private_file(path)
        assert opened is not None
    assert not path.exists()
    os.write(made, b"a")
    assert os.read(opened, 9) == b"a"
    os.close(made)
    os.close(opened)


def test_no_other_user_can_enter(path: Path) -> None:
    umask = os.umask(0)
    with private_folder(path) as made:
        assert path.stat().st_mode & 0o777 == 0o700
    os.umask(umask)
    os.close(made)


def test_a_folder_that_was_left_behind_is_replaced(path: Path) -> None:
    path.mkdir(0o700)
    (path / "store").write_text("old")
    assert open_private_file(path) is None, "no process has it locked"
    with private_folder(path) as made:
        assert os.read(made, 9) == b""
    os.close(made)


def test_a_later_folder_of_the_same_name_stays(path: Path) -> None:
    with private_folder(path) as made:
        path.rename(path.with_name("moved"))
        path.mkdir(0o700)
        (path / "store").touch()
    assert (path / "store").exists()
    os.close(made)


def test_a_folder_that_others_can_enter_is_refused(path: Path) -> None:
    path.mkdir(0o755)
    path.chmod(0o755)
    expected = re.escape(f"{path}: expected mode 700, found 755, which lets other users in; remove it")
    with pytest.raises(RendezvousError, match=expected):
        open_private_file(path)
    with pytest.raises(RendezvousError, match=expected), private_folder(path):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_folder_of_another_user_is_refused(path: Path) -> None:
    path.mkdir(0o700)
    os.chown(path, NOBODY, NOBODY)
    expected = rf"{re.escape(str(path))}: expected a folder of user 0, found one of user {NOBODY}; ask that user"
    with pytest.raises(RendezvousError, match=expected):
        open_private_file(path)
    with pytest.raises(RendezvousError, match=expected), private_folder(path):
        pass
    assert path.exists()


def test_a_link_is_not_followed(path: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(0o700)
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=r"Not a directory|symbolic links"):
        open_private_file(path)
    with pytest.raises((OSError, RendezvousError)), private_folder(path):
        pass
    assert (tmp_path / "elsewhere").is_dir()
