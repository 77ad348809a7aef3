from __future__ import annotations

import io
import sys

import pytest
from full_disk import full_disk

from hpctrain.streams import LogFile, LostOutput, flush_output, lost_output, missing_output_discarded, open_log


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


def test_text_that_a_log_lacks_is_counted(tmp_path, capsys):
    with open_log(tmp_path / "log") as log:
        with full_disk(0):
            print("first", file=log)
        assert lost_output(log, sys.stderr, None) == LostOutput(1, 6)
    assert capsys.readouterr().err.startswith(
        f"hpctrain: warning: {tmp_path / 'log'} can't be written (File too large)"
    )
