from __future__ import annotations

import pytest

from hpctrain.metrics.sink import RecordFile
from tests.support.full_disk import full_disk


def test_records_wait_for_a_full_disk_and_keep_their_order(tmp_path, caplog):
    path = tmp_path / "records"
    path.touch()
    file = RecordFile(path)
    file.append(b"first\n")
    with full_disk(10):
        file.append(b"second\n")
        file.append(b"third\n")
        assert path.read_bytes() == b"first\nseco"
    (line,) = caplog.messages
    assert line.startswith(
        f"{path} can't be written (File too large; a file reached the largest size that is allowed: "
    )
    assert line.endswith(", which allows 10 B here): records wait in memory")
    file.append(b"fourth\n")
    file.close()
    assert path.read_bytes() == b"first\nsecond\nthird\nfourth\n"
    assert caplog.records[-1].message == f"{path} can be written again"


def test_closing_writes_what_is_pending(tmp_path):
    path = tmp_path / "records"
    path.touch()
    file = RecordFile(path)
    with full_disk(3):
        file.append(b"record\n")
    file.close()
    assert path.read_bytes() == b"record\n"


def test_records_that_are_lost_at_the_end_are_counted(tmp_path, caplog):
    path = tmp_path / "records"
    path.touch()
    file = RecordFile(path)
    with full_disk(3):
        file.append(b"record\n")
        file.close()
    assert caplog.messages[-1] == f"{path} lacks its last 4 bytes: they couldn't be written"


def test_memory_stays_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("hpctrain.metrics.sink.MAX_PENDING_BYTES", 12)
    path = tmp_path / "records"
    path.touch()
    file = RecordFile(path)
    with full_disk(0):
        for record in (b"first\n", b"second\n", b"third\n"):
            file.append(record)
    file.close()
    assert path.read_bytes() == b"first\nthird\n"


def test_a_record_beyond_the_bound_is_written_if_none_waits(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("hpctrain.metrics.sink.MAX_PENDING_BYTES", 12)
    path = tmp_path / "records"
    path.touch()
    file = RecordFile(path)
    file.append(b"longer than the bound\n")
    with full_disk(0):
        for record in (b"first\n", b"second\n", b"third\n", b"fourth\n"):
            file.append(record)
    file.append(b"longer than the bound\n")
    file.close()
    assert path.read_bytes() == b"longer than the bound\nfirst\nthird\nlonger than the bound\n"
    dropped = [record.message for record in caplog.records if "dropped" in record.message]
    assert dropped == [f"{path}: too many records wait in memory, so some are dropped"]


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        RecordFile(tmp_path / "absent")
