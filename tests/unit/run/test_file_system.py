from __future__ import annotations

import errno
import os

import pytest
from full_disk import full_disk, small_disk, use_up_files

from hpctrain.errors import CheckpointError
from hpctrain.run.file_system import explain, limit_met


def error(number):
    return OSError(number, os.strerror(number))


def test_which_limit_was_met(tmp_path):
    with small_disk(tmp_path, "size=1m,nr_inodes=100"):
        assert limit_met(error(errno.ENOSPC), tmp_path / "a" / "b").startswith(
            f"{tmp_path} is out of space: 1.05 MB are "
        )
        assert limit_met(error(errno.EDQUOT), tmp_path) == (
            f"your quota of bytes or of files on {tmp_path} is used up: `quota -s` shows both"
        )
    with small_disk(tmp_path, "size=1g,nr_inodes=100"):
        found = limit_met(error(errno.ENOSPC), tmp_path)
        assert found.startswith(f"{tmp_path} refuses to store more, although 1.07 GB are free: perhaps the quota of ")
    with small_disk(tmp_path, "size=1m,nr_inodes=100"):
        use_up_files(tmp_path)
        expected = f"{tmp_path} is out of files: 1.05 MB are free, but no more files (inodes) can be created; "
        assert limit_met(CheckpointError("rank 1: No space left on device"), tmp_path).startswith(expected)
        with pytest.raises(OSError, match="No space left") as raised:
            (tmp_path / "another").touch()
        found = explain(raised.value)
        assert found.startswith(f"{tmp_path}/another: No space left on device; {expected}")
        assert found.endswith(f"; `df -i {tmp_path}` shows them")


def test_limits_that_are_no_want_of_room(tmp_path):
    with full_disk(2000):
        assert limit_met(error(errno.EFBIG), tmp_path).endswith(
            "`ulimit -f` shows the limit of a process, which allows 2 kB here"
        )
    assert " is read-only, perhaps " in limit_met(error(errno.EROFS), tmp_path)
    assert explain(error(errno.EACCES), tmp_path) == "Permission denied"
    assert limit_met(ValueError("No such file"), tmp_path) == ""
