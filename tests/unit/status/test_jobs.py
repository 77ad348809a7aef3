from __future__ import annotations

import os

import pytest

from hpctrain.run.job_records import JobRecords
from hpctrain.status.jobs import batch_script_error


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.mkdir(),
        lambda path: path.symlink_to(path),
    ],
    ids=["pipe", "device", "folder", "link to itself"],
)
def test_something_else_in_place_of_the_batch_log_has_no_error(directory, make):
    log = directory.path / "log"
    JobRecords(directory).add({"job_id": "12", "time": 9.0, "log": str(log)})
    make(log)
    assert batch_script_error(directory, ran=True) == ""


def test_the_last_error_of_a_long_batch_log_is_found(directory):
    log = directory.path / "log"
    JobRecords(directory).add({"job_id": "12", "time": 9.0, "log": str(log)})
    log.write_text("hpctrain: error: first\n" + "x" * 3 * 2**20 + "\nhpctrain: error: last\n")
    assert batch_script_error(directory, ran=True) == "last"
