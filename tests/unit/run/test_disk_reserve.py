from __future__ import annotations

import errno
import os
import shutil

import pytest

from hpctrain.run.directory import RunDirectory
from hpctrain.run.disk_reserve import BYTES, give_room, keep_room, with_room
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason


def full_disk(claim, number=errno.ENOSPC):
    """A write to a disk on which nothing but the room is left."""

    def write():
        if (claim / "room").exists():
            raise OSError(number, os.strerror(number))
        return "written"

    return write


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_the_room_takes_the_last_words(tmp_path, number):
    keep_room(tmp_path)
    assert (tmp_path / "room").stat().st_blocks * 512 >= BYTES
    assert with_room(tmp_path, full_disk(tmp_path, number)) == "written"
    keep_room(tmp_path)
    with pytest.raises(OSError, match=os.strerror(number)):
        with_room(tmp_path, lambda: [full_disk(tmp_path, number)(), keep_room(tmp_path), full_disk(tmp_path, number)()])


def test_other_refusals_leave_the_room(tmp_path):
    keep_room(tmp_path)
    with pytest.raises(OSError, match="Read-only"):
        with_room(tmp_path, full_disk(tmp_path, errno.EROFS))
    assert (tmp_path / "room").exists()


def test_no_room_is_no_error(tmp_path):
    shutil.rmtree(tmp_path)
    keep_room(tmp_path)
    give_room(tmp_path)


def test_an_attempt_has_room_from_its_claim_to_its_end(tmp_path):
    directory = RunDirectory.at(tmp_path / "run")
    directory.create(0o750)
    ledger = Ledger(directory)
    room = directory.claim(ledger.claim()) / "room"
    assert room.exists()
    ledger.end(1, reason=Reason.COMPLETED, step=8)
    assert not room.exists()
