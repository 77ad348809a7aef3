"""Paths that this user can't read or write; as root, the tests become another user."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpctrain.config.compose import Composer
from hpctrain.config.paths import check_run_directory, check_weights, is_folder
from hpctrain.errors import ConfigError

NOBODY = 65534
REFUSED = "(you have no permission to (read|write)|can't be accessed)"


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that every user can enter, unlike tmp_path."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@contextlib.contextmanager
def as_another_user() -> Iterator[None]:
    root = os.geteuid() == 0
    if root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.fixture
def closed(place: Path) -> Iterator[Path]:
    folder = place / "closed"
    (folder / "inside").mkdir(parents=True)
    (folder / "w.pt").write_bytes(b"PK\x03\x04")
    folder.chmod(0)
    yield folder
    folder.chmod(0o700)


def test_a_run_directory_is_refused_where_this_user_cannot_write(closed: Path) -> None:
    for path in (closed, closed / "run", closed / "inside" / "run"):
        with (
            as_another_user(),
            pytest.raises(ConfigError, match=rf"run_dir=\S+: {REFUSED}"),
        ):
            check_run_directory(str(path), in_batch_script=False)
    check_run_directory(str(closed.parent / "new" / "run"), in_batch_script=False)


def test_weights_that_this_user_cannot_read(closed: Path) -> None:
    for path in (closed, closed / "w.pt", closed / "inside"):
        with (
            as_another_user(),
            pytest.raises(ConfigError, match=rf"init_from=\S+: {REFUSED}"),
        ):
            check_weights(str(path))


def test_folders_that_this_user_cannot_read(closed: Path) -> None:
    for path in (closed, closed / "inside"):
        with (
            as_another_user(),
            pytest.raises(ConfigError, match=rf"task.data=\S+: {REFUSED}"),
        ):
            is_folder("task.data", path)
        with as_another_user(), pytest.raises(ConfigError, match=re.escape(f"--config-dir={path}: ")):
            Composer(str(path))


def test_what_is_there_is_taken(place: Path) -> None:
    (place / "config.yaml").touch()
    (place / "w.bin").write_bytes(b"\x80\x02...")
    for path in (place, place / "w.bin"):
        check_weights(str(path))
    assert is_folder("task.data", place)
    assert not is_folder("task.data", place / "w.bin")
    assert not is_folder("task.data", place / "nowhere")
