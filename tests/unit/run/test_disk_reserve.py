from __future__ import annotations

import errno
import os
import shutil

import pytest

from hpctrain.run.directory import RunDirectory
from hpctrain.run.disk_reserve import BYTES, release, reserve, write_with_reserve
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason


def full_disk(claim, number=errno.ENOSPC):
    """A write to a disk on which nothing is left but the reserved space."""

    def write():
        if (claim / "room").exists():
            raise OSError(number, os.strerror(number))
        (claim / "record").touch()

    return write


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_the_reserve_takes_the_end_record(tmp_path, number):
    reserve(tmp_path)
    assert (tmp_path / "room").stat().st_blocks * 512 >= BYTES
    write_with_reserve(tmp_path, full_disk(tmp_path, number))
    assert (tmp_path / "record").exists()
    reserve(tmp_path)
    with pytest.raises(OSError, match=os.strerror(number)):
        write_with_reserve(
            tmp_path, lambda: [full_disk(tmp_path, number)(), reserve(tmp_path), full_disk(tmp_path, number)()]
        )


def test_other_refusals_leave_the_reserve(tmp_path):
    reserve(tmp_path)
    with pytest.raises(OSError, match="Read-only"):
        write_with_reserve(tmp_path, full_disk(tmp_path, errno.EROFS))
    assert (tmp_path / "room").exists()


def test_a_claim_that_is_gone_is_no_error(tmp_path):
    shutil.rmtree(tmp_path)
    reserve(tmp_path)
    release(tmp_path)


def test_an_attempt_reserves_space_from_its_claim_to_its_end(tmp_path):
    directory = RunDirectory.at(tmp_path / "run")
    directory.create(0o750)
    ledger = Ledger(directory)
    room = directory.claim(ledger.claim()) / "room"
    assert room.exists()
    ledger.end(1, reason=Reason.COMPLETED, step=8)
    assert not room.exists()
