from __future__ import annotations

import pytest

from hpctrain.run.growing_file import Appended, GrowingFile, start_of_last_lines


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def test_a_file_that_appears_and_grows(path):
    file = GrowingFile(path)
    assert file.read_lines() == Appended()
    path.write_bytes(b"one\ntw")
    assert file.read_lines() == Appended(b"one\n")
    assert file.read_lines() == Appended()
    with path.open("ab") as appended:
        appended.write(b"o\nthree\n")
    assert file.read_lines() == Appended(b"two\nthree\n")


def test_the_first_read_begins_near_the_end_of_a_large_file(path):
    path.write_bytes(b"".join(b"line %d\n" % number for number in range(1000)))
    assert GrowingFile(path, -20).read_lines() == Appended(b"line 998\nline 999\n")


def test_a_file_that_was_replaced_is_read_anew(path):
    path.write_bytes(b"one\ntwo\nthree\n")
    file = GrowingFile(path)
    file.read_lines()
    (path.parent / "new").write_bytes(b"one\ntwo\nfour\nfive\n")
    (path.parent / "new").replace(path)
    assert file.read_lines() == Appended(b"one\ntwo\nfour\nfive\n", anew=True)


def test_a_file_that_was_cut_is_read_anew(path):
    path.write_bytes(b"one\ntwo\n")
    file = GrowingFile(path)
    file.read_lines()
    path.write_bytes(b"one\n")
    assert file.read_lines() == Appended(b"one\n", anew=True)
    # cut, and grown beyond the old end since
    path.write_bytes(b"two\nthree\nfour\n")
    assert file.read_lines() == Appended(b"two\nthree\nfour\n", anew=True)


def test_a_file_that_was_removed(path):
    path.write_bytes(b"one\n")
    file = GrowingFile(path)
    file.read_lines()
    path.unlink()
    assert file.read_lines() == Appended(anew=True)
    assert file.read_lines() == Appended()
    path.write_bytes(b"two\n")
    assert file.read_lines() == Appended(b"two\n")


def test_what_is_no_file_is_an_error(path):
    path.mkdir()
    with pytest.raises(OSError, match="not a regular file"):
        GrowingFile(path).read_lines()


def append(path, text):
    with path.open("a") as file:
        file.write(text)


def test_half_lines_of_a_log_are_read_as_they_come(path):
    log = GrowingFile(path)
    assert log.read().data == b""
    append(path, "one\ntw")
    assert log.read().data == b"one\ntw"
    assert log.read().data == b""
    append(path, "o\n")
    assert log.read().data == b"o\n"


def test_a_position_that_another_process_stored_is_read_on(path):
    path.write_bytes(b"one\ntw")
    first = GrowingFile(path)
    assert (first.read_lines().lines, first.position) == ([b"one"], 4)
    append(path, "o\n")
    assert GrowingFile(path, first.position).read_lines() == Appended(b"two\n")
    path.write_bytes(b"new")
    assert GrowingFile(path, first.position).read() == Appended(b"new", anew=True)


def test_more_than_one_read_returns_is_left_for_the_next(path, monkeypatch):
    monkeypatch.setattr("hpctrain.run.growing_file.LINES_BYTES", 6)
    path.write_bytes(b"one\ntwo\nlonger than a read\n")
    file = GrowingFile(path)
    reads = iter(file.read_lines, Appended())
    assert [appended.data for appended in reads] == [b"one\n", b"two\n", b"longer", b" than ", b"a read", b"\n"]


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
def test_reading_may_begin_with_the_last_lines(path, content, lines, expected):
    path.write_text(content)
    log = GrowingFile(path, start_of_last_lines(path, lines))
    assert log.read().data.decode() == expected
    append(path, "new\n")
    assert log.read().data == b"new\n"


def test_last_lines_may_lie_far_back(path, monkeypatch):
    monkeypatch.setattr("hpctrain.run.growing_file.CHUNK_BYTES", 7)
    path.write_text("".join(f"line {number}\n" for number in range(20)))
    for lines in range(1, 25):
        log = GrowingFile(path, start_of_last_lines(path, lines))
        text = b""
        while data := log.read().data:
            text += data
        assert text.decode().splitlines() == [f"line {number}" for number in range(20)][-lines:]
