from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from hpctrain.errors import RunDirectoryError
from hpctrain.files import (
    DEEPEST,
    LARGEST_BYTES,
    IrregularFileError,
    append_json_line,
    parse_json,
    read_bytes,
    read_json,
    read_json_lines,
    temporary_name,
    write_atomic,
    write_json,
    write_new,
)


def names(directory):
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("content", ["grün\n", b"\x00\xff", ""])
def test_the_whole_content_is_there_and_nothing_else(tmp_path, content, durable):
    path = tmp_path / "file"
    path.write_text("before")
    write_atomic(path, content, durable=durable)
    assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert names(tmp_path) == ["file"]


def test_a_new_file_replaces_nothing(tmp_path):
    path = tmp_path / "file"
    assert write_new(path, "grün", mode=0o600)
    assert not write_new(path, "later")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("grün", 0o600)
    with pytest.raises(FileNotFoundError, match=f": '{tmp_path}/absent/file'$"):
        write_new(tmp_path / "absent" / "file", "")
    assert names(tmp_path) == ["file"]


def test_a_new_file_whose_link_nfs_has_repeated_is_this_one(tmp_path, monkeypatch):
    path, link = tmp_path / "file", os.link

    def repeated(source, target):
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", repeated)
    assert write_new(path, "mine")
    assert not write_new(path, "later")
    assert (path.read_text(), names(tmp_path)) == ("mine", ["file"])


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "file"
    path.write_text("before")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, before[1]))
    try:
        with pytest.raises(OSError, match=f"too large: '{path}'$"):
            write_atomic(path, "longer than four bytes")
        with pytest.raises(OSError, match=f"too large: '{path}'$"):
            append_json_line(path, {"longer": "than four bytes"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with pytest.raises(FileNotFoundError, match=f": '{tmp_path}/absent/file'$"):
        write_atomic(tmp_path / "absent" / "file", "")
    assert path.read_text() == "before"
    assert names(tmp_path) == ["file"]


def test_a_writer_killed_at_any_moment_leaves_a_whole_file(tmp_path):
    path = tmp_path / "file"
    program = """
import sys
from pathlib import Path
from hpctrain.files import write_atomic

number = 0
while True:
    number += 1
    write_atomic(Path(sys.argv[1]), f"{number} " * 20000, durable=False)
"""
    write_atomic(path, "0 " * 20000)
    for _ in range(4):
        process = subprocess.Popen([sys.executable, "-c", program, str(path)])
        started = path.stat().st_mtime_ns
        while path.stat().st_mtime_ns == started:
            time.sleep(0.001)
        process.kill()
        process.wait()
        words = path.read_text().split()
        assert len(words) == 20000
        assert len(set(words)) == 1


def test_two_writers_use_two_temporary_names(tmp_path):
    first, second = temporary_name(tmp_path / "file"), temporary_name(tmp_path / "file")
    assert first != second
    assert first.parent == tmp_path


def test_json_goes_there_and_back(tmp_path):
    record = {"name": "digits", "nested": {"values": [1, 2.5, None, "ü"]}}
    write_json(tmp_path / "file.json", record)
    assert read_json(tmp_path / "file.json") == record


@pytest.mark.parametrize("content", ["", "{", "[1]", '"text"', "null"])
def test_what_is_no_json_object_is_named(tmp_path, content):
    path = tmp_path / "file.json"
    path.write_text(content)
    with pytest.raises(RunDirectoryError, match=r"file\.json: expected a JSON object"):
        read_json(path)


def test_an_absent_json_file_is_absent(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "file.json")
    assert list(read_json_lines(tmp_path / "file.jsonl")) == []


@pytest.mark.parametrize("durable", [True, False])
def test_lines_come_back_in_order(tmp_path, durable):
    path = tmp_path / "lines.jsonl"
    records = [{"number": number, "text": "a\nb\u2028"} for number in range(5)]
    for record in records:
        append_json_line(path, record, durable=durable)
    assert list(read_json_lines(path)) == records


def test_a_torn_last_line_costs_itself_alone(tmp_path):
    path = tmp_path / "lines.jsonl"
    append_json_line(path, {"number": 1})
    with path.open("ab") as file:
        file.write(json.dumps({"number": 2}).encode()[:7])
    assert list(read_json_lines(path)) == [{"number": 1}]
    append_json_line(path, {"number": 3})
    append_json_line(path, {"number": 4})
    assert [record["number"] for record in read_json_lines(path)] == [1, 3, 4]


NEARLY_FULL = """
import json, resource, signal, sys
from pathlib import Path
from hpctrain.files import append_json_line

path, room = Path(sys.argv[1]), int(sys.argv[2])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
before = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + room, before[1]))
try:
    append_json_line(path, {"number": 2, "text": "x" * 100})
except OSError as error:
    print(error.strerror)
"""


@pytest.mark.parametrize("torn", ["", '{"number":'])
def test_a_line_for_which_the_disk_has_room_in_part_is_refused_and_leaves_nothing(tmp_path, torn):
    path = tmp_path / "lines.jsonl"
    append_json_line(path, {"number": 1})
    with path.open("a") as file:
        file.write(torn)
    before = path.read_bytes()
    done = subprocess.run(
        [sys.executable, "-c", NEARLY_FULL, str(path), "40"], check=True, stdout=subprocess.PIPE, text=True
    )
    assert "too large" in done.stdout
    assert path.read_bytes() == before


def test_a_line_that_the_kernel_takes_in_parts_is_whole(tmp_path, monkeypatch):
    path = tmp_path / "lines.jsonl"
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:7]))
    append_json_line(path, {"number": 1, "text": "x" * 100})
    append_json_line(path, {"number": 2})
    assert [record["number"] for record in read_json_lines(path)] == [1, 2]


def test_lines_that_are_no_objects_are_passed_over(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'1\n[]\n\n\xff\xfe\n\x00\x00\n{"number": 1}\n')
    assert list(read_json_lines(path)) == [{"number": 1}]


def test_lines_of_several_writers_never_mix(tmp_path):
    path = tmp_path / "lines.jsonl"

    def append_many(writer):
        for number in range(200):
            append_json_line(path, {"writer": writer, "number": number, "padding": "x" * 500})

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(append_many, range(3)))
    records = list(read_json_lines(path))
    assert len(records) == 600
    for writer in range(3):
        assert [record["number"] for record in records if record["writer"] == writer] == list(range(200))
    assert names(tmp_path) == ["lines.jsonl"]


@pytest.mark.timeout(20)
def test_what_could_block_a_reader_or_never_end_is_refused(tmp_path):
    pipe, device = tmp_path / "pipe", tmp_path / "device"
    os.mkfifo(pipe)
    device.symlink_to("/dev/zero")
    with pytest.raises(OSError, match="not a regular file"):
        read_bytes(pipe)
    writer = os.open(pipe, os.O_RDWR)
    for path in (pipe, device):
        for last_bytes in (None, 100):
            with pytest.raises(OSError, match="not a regular file"):
                list(read_json_lines(path, last_bytes=last_bytes))
    os.close(writer)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r'"\ud83d\ude00 \ud800 \udfff"', "\U0001f600 \ufffd \ufffd"),
        (r'"a path \udce9 \udc80"', "a path \udce9 \udc80"),
        (r'"\\ud800 \\\ud800"', "\\ud800 \\\ufffd"),
        ("[" * DEEPEST + "]" * DEEPEST, None),
        ('[["[[["]]', [["[[["]]),
    ],
)
def test_json_of_others_is_valid_unicode(text, value):
    assert value is None or parse_json(text.encode()) == value
    assert json.dumps(parse_json(text.encode()), ensure_ascii=False).encode(errors="surrogateescape")


@pytest.mark.parametrize(
    "data",
    [b'"\xed\xa0\x80"', b"\xff", b"[" * (DEEPEST + 1) + b"]" * (DEEPEST + 1), b"[" * 100_000, b"9" * 5000, b"\0", b""],
)
def test_json_that_cannot_be_read_is_a_value_error(data):
    with pytest.raises(ValueError, match=r"."):
        parse_json(data)


def test_only_a_regular_file_of_a_sensible_size_is_read(tmp_path):
    path = tmp_path / "record.json"
    for make, problem in (
        (os.mkfifo, "not a regular file"),
        (os.mkdir, "not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
        (
            lambda path: (path.touch(), os.truncate(path, 2**42)),
            f"it has {2**42} bytes, expected at most {LARGEST_BYTES}",
        ),
    ):
        make(path)
        for read in (read_bytes, read_json, lambda path: list(read_json_lines(path))):
            with pytest.raises(IrregularFileError, match=problem):
                read(path)
        path.rmdir() if path.is_dir() else path.unlink()


def test_lines_that_are_too_long_are_skipped_as_they_come(tmp_path, monkeypatch):
    monkeypatch.setattr("hpctrain.files._LONGEST_LINE", 100)
    monkeypatch.setattr("hpctrain.files._BLOCK", 10)
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\n' + '{"b": "' + "x" * 200 + '"}\n{"c": 3}\n{"d": 4}')
    assert list(read_json_lines(path)) == [{"a": 1}, {"c": 3}, {"d": 4}]
    assert list(read_json_lines(path, last_bytes=12)) == [{"d": 4}]
