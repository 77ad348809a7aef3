from __future__ import annotations

import os

import pytest

from hpctrain.run.job_records import JobRecords
from hpctrain.status.log import Tail, batch_script_error, start_of_last_lines


def append(path, text):
    with path.open("a") as file:
        file.write(text)


def test_a_file_that_comes_later_and_grows(tmp_path):
    path = tmp_path / "log"
    tail = Tail(path)
    assert tail.read() == b""
    append(path, "one\ntw")
    assert tail.read() == b"one\ntw"
    assert tail.read() == b""
    append(path, "o\n")
    assert tail.read() == b"o\n"


def test_a_file_that_is_cut_is_read_from_its_beginning(tmp_path):
    path = tmp_path / "log"
    append(path, "a long first attempt\n")
    tail = Tail(path)
    tail.read()
    path.write_text("second\n")
    assert tail.read() == b"second\n"


def test_a_file_that_goes_away_may_come_back(tmp_path):
    path = tmp_path / "log"
    append(path, "first\n")
    tail = Tail(path)
    tail.read()
    path.unlink()
    assert tail.read() == b""
    append(path, "second\n")
    assert tail.read() == b"second\n"


@pytest.mark.parametrize(
    ("content", "lines", "expected"),
    [
        ("a\nb\nc\n", 2, "b\nc\n"),
        ("a\nb\nc", 2, "b\nc"),
        ("a\nb\n\n", 2, "b\n\n"),
        ("a\nb\n", 9, "a\nb\n"),
        ("a\n", 1, "a\n"),
        ("a", 1, "a"),
        ("\n", 1, "\n"),
        ("a\nb\n", 0, ""),
        ("a\nb", 0, ""),
        ("", 3, ""),
    ],
)
def test_reading_may_begin_with_the_last_lines(tmp_path, content, lines, expected):
    path = tmp_path / "log"
    path.write_text(content)
    tail = Tail(path, start_of_last_lines(path, lines))
    assert tail.read().decode() == expected
    append(path, "new\n")
    assert tail.read() == b"new\n"


def test_last_lines_may_lie_far_back(tmp_path, monkeypatch):
    monkeypatch.setattr("hpctrain.status.log.CHUNK_BYTES", 7)
    path = tmp_path / "log"
    path.write_text("".join(f"line {number}\n" for number in range(20)))
    for lines in range(1, 25):
        tail = Tail(path, start_of_last_lines(path, lines))
        text = b""
        while data := tail.read():
            text += data
        assert text.decode().splitlines() == [f"line {number}" for number in range(20)][-lines:]


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "make",
    [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.mkdir()],
    ids=["pipe", "device", "folder"],
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
