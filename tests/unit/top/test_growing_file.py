from __future__ import annotations

import os

import pytest

from hpctrain.top.growing_file import OPEN_EVERY_S, Appended, GrowingFile


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def test_a_file_that_appears_and_grows(path, clock):
    file = GrowingFile(path, clock=clock)
    assert file.read() == Appended()
    path.write_bytes(b"one\ntw")
    assert file.read() == Appended((b"one",))
    assert file.read() == Appended()
    with path.open("ab") as appended:
        appended.write(b"o\nthree\n")
    assert file.read() == Appended((b"two", b"three"))


def test_the_first_read_begins_near_the_end_of_a_large_file(path):
    path.write_bytes(b"".join(b"line %d\n" % number for number in range(1000)))
    assert GrowingFile(path, first_bytes=20).read() == Appended((b"line 998", b"line 999"))


def test_a_file_that_was_replaced_is_read_anew(path):
    path.write_bytes(b"one\ntwo\nthree\n")
    file = GrowingFile(path)
    file.read()
    (path.parent / "new").write_bytes(b"one\ntwo\nfour\nfive\n")
    (path.parent / "new").replace(path)
    assert file.read() == Appended((b"one", b"two", b"four", b"five"), anew=True)


def test_a_file_that_was_cut_is_read_anew(path):
    path.write_bytes(b"one\ntwo\n")
    file = GrowingFile(path)
    file.read()
    path.write_bytes(b"one\n")
    assert file.read() == Appended((b"one",), anew=True)
    # cut, and grown beyond the old end since
    path.write_bytes(b"two\nthree\nfour\n")
    assert file.read() == Appended((b"two", b"three", b"four"), anew=True)


def test_a_file_that_was_removed(path):
    path.write_bytes(b"one\n")
    file = GrowingFile(path)
    file.read()
    path.unlink()
    assert file.read() == Appended(anew=True)
    assert file.read() == Appended()
    path.write_bytes(b"two\n")
    assert file.read() == Appended((b"two",))


def test_an_unchanged_size_is_trusted_only_for_a_while(path, clock):
    path.write_bytes(b"one\n")
    file = GrowingFile(path, clock=clock)
    file.read()
    before = path.stat()
    path.write_bytes(b"two\n")  # as over NFS, whose client remembers size and time of the last change
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.read() == Appended()
    clock.advance(OPEN_EVERY_S)
    assert file.read() == Appended((b"two",), anew=True)


def test_what_is_no_file_is_an_error(path):
    path.mkdir()
    with pytest.raises(OSError, match="not a regular file"):
        GrowingFile(path).read()
