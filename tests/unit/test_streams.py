from __future__ import annotations

import contextlib
import io
import logging
import subprocess
import sys

import pytest

from hpctrain.streams import (
    LogFile,
    LogHandler,
    LostOutput,
    flush_output,
    lost_output,
    missing_output_discarded,
    open_log,
)
from tests.support.full_disk import full_disk, small_disk


def closed():
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [None, object(), closed()], ids=["none", "no flush", "closed"])
def test_output_is_flushed_as_far_as_it_can_be(monkeypatch, stream):
    rest = io.TextIOWrapper(io.BytesIO())
    rest.write("x")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", rest)
    flush_output()
    assert rest.buffer.getvalue() == b"x"


@pytest.mark.parametrize("stream", [None, closed()], ids=["none", "closed"])
def test_a_missing_stream_is_there_for_a_while(monkeypatch, capsys, stream):
    errors = sys.stderr
    monkeypatch.setattr(sys, "stdout", stream)
    with missing_output_discarded():
        print("a", file=sys.stdout)
        assert sys.stderr is errors
    assert sys.stdout is stream


def test_a_log_names_the_lines_that_a_full_disk_cost_it(tmp_path):
    path, reports = tmp_path / "log", []
    with LogFile(path) as log:
        log.report = reports.append
        log.write(b"first\n")
        with full_disk(10):
            assert log.write(b"second\n") == 7
            assert log.write(b"third\nfou") == 9
        assert log.lost == LostOutput(2, 12)
        log.write(b"rth\n")
        log.write(b"fifth\n")
        assert log.lost == LostOutput(2, 12)
    mark = "hpctrain: 2 lines (12 bytes) lost here: the file could not be written (File too large)"
    assert path.read_text() == f"first\nseco\n{mark}\nrth\nfifth\n"
    assert reports == [f"{path} can't be written (File too large): lines are lost while that lasts"]


def test_a_log_is_completed_at_its_end(tmp_path):
    path = tmp_path / "log"
    log = LogFile(path)
    with full_disk(0):
        log.write(b"first\nsecond\n")
    log.close()
    assert path.read_text().startswith("hpctrain: 2 lines (13 bytes) lost here")
    assert log.lost == LostOutput(2, 13)


def test_a_log_that_was_removed_lacks_all_of_its_lines(tmp_path):
    log = LogFile(tmp_path / "log")
    log.write(b"first\n")
    (tmp_path / "log").unlink()
    log.write(b"second\n")
    log.close()
    assert log.lost == LostOutput(2, 13)


@pytest.mark.parametrize("why", ["File too large", "it was closed"])
def test_a_log_that_cannot_be_written_costs_one_line(tmp_path, capsys, why):
    path = tmp_path / "log"
    with path.open("w", buffering=1) as stream:
        handler = LogHandler(stream)
        handler.handle(logging.makeLogRecord({"msg": "first"}))
        if why == "it was closed":
            stream.close()
        with full_disk(0) if why == "File too large" else contextlib.nullcontext():
            for number in range(3):
                handler.handle(logging.makeLogRecord({"msg": f"lost {number}"}))
        assert capsys.readouterr().err.count("\n") == 1
        if why == "File too large":
            handler.handle(logging.makeLogRecord({"msg": "last"}))
    assert path.read_text().startswith("first\n")
    assert path.read_text().endswith("last\n") is (why == "File too large")


def test_a_record_that_is_wrong_is_reported_as_ever(tmp_path, capsys):
    with (tmp_path / "log").open("w") as stream:
        LogHandler(stream).handle(logging.makeLogRecord({"msg": "%d", "args": ("x",)}))
    assert "--- Logging error ---" in capsys.readouterr().err


@pytest.mark.parametrize(("errors", "lines"), [(subprocess.PIPE, 1), (subprocess.STDOUT, 0)])
def test_a_program_learns_once_that_its_output_is_lost(tmp_path, errors, lines):
    script = """
from hpctrain.streams import ignore_write_errors
ignore_write_errors()
for number in range(3):
    print(number, flush=True)
"""
    with small_disk(tmp_path, "size=8k"), (tmp_path / "out").open("w") as out:
        (tmp_path / "filler").write_bytes(bytes(8192))
        done = subprocess.run([sys.executable, "-c", script], stdout=out, stderr=errors, text=True, check=True)
    warning = f"hpctrain: warning: {tmp_path}/out can't be written (No space left on device): lines are lost "
    assert (done.stderr or "").count(warning) == (done.stderr or "").count("\n") == lines


def test_text_that_a_log_lacks_is_counted(tmp_path, capsys):
    with open_log(tmp_path / "log") as log:
        with full_disk(0):
            print("first", file=log)
        assert lost_output(log, sys.stderr, None) == LostOutput(1, 6)
    assert capsys.readouterr().err.startswith(
        f"hpctrain: warning: {tmp_path / 'log'} can't be written (File too large)"
    )
