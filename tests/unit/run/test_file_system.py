from __future__ import annotations

import contextlib
import errno
import os
import shutil

import pytest

from hpctrain.attempt.outcome import Outcome, record_end
from hpctrain.errors import CheckpointError, RunDirectoryUnavailableError
from hpctrain.run.directory import RunDirectory
from hpctrain.run.exit_record import ExitRecord, read_exit_records
from hpctrain.run.file_system import (
    RESERVED_BYTES,
    explain,
    limit_met,
    release,
    reserve,
    reserve_for_rank,
    write_with_reserve,
)
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason
from tests.support.full_disk import full_disk, small_disk, use_up_files


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


def filling_up(claim, number=errno.ENOSPC):
    """A write to a disk on which nothing is left but the reserved space."""

    def write():
        if (claim / "room").exists():
            raise OSError(number, os.strerror(number))
        (claim / "record").touch()

    return write


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_the_reserve_takes_the_end_record(tmp_path, number):
    reserve(tmp_path)
    assert (tmp_path / "room").stat().st_blocks * 512 >= RESERVED_BYTES
    write_with_reserve(tmp_path, filling_up(tmp_path, number))
    assert (tmp_path / "record").exists()
    reserve(tmp_path)
    with pytest.raises(OSError, match=os.strerror(number)):
        write_with_reserve(
            tmp_path,
            lambda: [filling_up(tmp_path, number)(), reserve(tmp_path), filling_up(tmp_path, number)()],
        )


def test_other_refusals_leave_the_reserve(tmp_path):
    reserve(tmp_path)
    with pytest.raises(OSError, match="Read-only"):
        write_with_reserve(tmp_path, filling_up(tmp_path, errno.EROFS))
    assert (tmp_path / "room").exists()


def test_a_claim_that_is_gone_is_no_error(tmp_path):
    shutil.rmtree(tmp_path)
    reserve(tmp_path)
    reserve_for_rank(tmp_path, 0)
    release(tmp_path)


def test_an_attempt_reserves_space_from_its_claim_to_its_end(tmp_path):
    directory = RunDirectory.at(tmp_path / "run")
    directory.create(0o750)
    ledger = Ledger(directory)
    room = directory.attempt(ledger.claim()) / "room"
    assert room.exists()
    ledger.end(1, reason=Reason.COMPLETED, step=8)
    assert list(room.parent.iterdir()) == [room.parent / "ended"]


@pytest.mark.parametrize("has_started", [True, False])
def test_a_disk_without_files_takes_the_end_of_every_rank(tmp_path, has_started):
    with small_disk(tmp_path, "size=1m,nr_inodes=100"):
        directory = RunDirectory.at(tmp_path / "run")
        directory.create(0o750)
        ledger = Ledger(directory)
        claim = directory.attempt(ledger.claim())
        if has_started:
            ledger.start(1, job_id=None, nodes=["n1"], world_size=3, step=0)
        for rank in range(3):
            reserve_for_rank(claim, rank)
        use_up_files(tmp_path)
        for rank in range(3):
            ExitRecord(rank=rank, host="n1", reason=Reason.FAILED, step=7).write(claim)
        use_up_files(tmp_path)
        record_end(directory, 1, Outcome(Reason.FAILED, 7, "why"), world_size=3)
        assert set(read_exit_records(claim)) == {0, 1, 2}
        assert [(one.reason, one.end_step, one.detail) for one in ledger.attempts()] == [(Reason.FAILED, 7, "why")]
        assert not list(claim.glob("room*"))


def test_an_attempt_that_could_not_end_does_not_begin(tmp_path):
    with small_disk(tmp_path, "size=1m,nr_inodes=100"):
        directory = RunDirectory.at(tmp_path / "run")
        directory.create(0o750)
        use_up_files(tmp_path)
        for number in range(3):  # for the claim and a part of its reserve
            (tmp_path / f"filler_{number}").unlink()
        with pytest.raises(RunDirectoryUnavailableError, match=r"claimed \(No space left .* is out of files: "):
            Ledger(directory).claim()
        assert Ledger(directory).last_claim() == 0


def test_an_attempt_begins_where_its_end_fits_but_not_a_long_traceback(tmp_path):
    with small_disk(tmp_path, "size=1m"):
        directory = RunDirectory.at(tmp_path / "run")
        directory.create(0o750)
        (tmp_path / "filler").write_bytes(bytes(2**20 - 100 * 2**10))
        ledger = Ledger(directory)
        claim = directory.attempt(ledger.claim())
        ledger.start(1, job_id=None, nodes=["n1"], world_size=1, step=0)
        # the run itself may use the rest
        with contextlib.suppress(OSError):
            (tmp_path / "rest").write_bytes(bytes(2**20))
        assert (tmp_path / "rest").stat().st_size > 2**14
        record_end(directory, 1, Outcome(Reason.FAILED, 7, "why"), world_size=1)
        assert [(one.reason, one.end_step, one.detail) for one in ledger.attempts()] == [(Reason.FAILED, 7, "why")]
        assert not list(claim.glob("room*"))
