from __future__ import annotations

import csv
import math

import pytest

from hpctrain.metrics import csv_file
from hpctrain.metrics.csv_file import CsvSink
from hpctrain.status.metrics import LoggedMetrics


def rows(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_columns_appear_when_their_names_do(tmp_path):
    path, now = tmp_path / "metrics.csv", [10.0]
    sink = CsvSink(path, list, clock=lambda: now[0])
    sink.log(1, {"train/loss": 0.5})
    now[0] = 11.5
    sink.log(2, {"train/loss": math.nan, "train/kl, all": 2.0})
    sink.log(2, {"eval/loss": math.inf})
    sink.close()
    assert rows(path) == [
        ["step", "time", "train/loss", "train/kl, all", "eval/loss"],
        ["1", "10.0", "0.5", "", ""],
        ["2", "11.5", "nan", "2.0", ""],
        ["2", "11.5", "", "", "inf"],
    ]


def test_it_continues_after_the_records_of_earlier_attempts(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("step,time,train/loss\n99,1.0,0.1\n")
    before = [LoggedMetrics(1, 3.0, {"b": 1.0}), LoggedMetrics(2, None, {"a": 2.0})]
    sink = CsvSink(path, lambda: before, clock=lambda: 4.0)
    sink.log(3, {"a": 3.0})
    sink.close()
    assert rows(path) == [
        ["step", "time", "b", "a"],
        ["1", "3.0", "1.0", ""],
        ["2", "", "", "2.0"],
        ["3", "4.0", "", "3.0"],
    ]


def test_rows_wait_for_a_file_that_cannot_be_replaced(tmp_path, caplog, monkeypatch):
    path, now = tmp_path / "metrics.csv", [0.0]
    sink = CsvSink(path, list, clock=lambda: now[0])

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("hpctrain.metrics.csv_file.write_atomic", fail)
        for step in (1, 2):
            now[0] += 1
            sink.log(step, {"a": 1.0})
    assert len(caplog.records) == 1
    sink.close()
    assert [row[0] for row in rows(path)] == ["step", "1", "2"]


def test_new_columns_wait_if_the_file_takes_long_to_replace(tmp_path, monkeypatch):
    path, now = tmp_path / "metrics.csv", [1000.0]
    sink = CsvSink(path, list, clock=lambda: now[0])
    replaced, replace = [], csv_file.write_atomic

    def slow(*arguments, **options):
        replaced.append(now[0])
        now[0] += 2
        replace(*arguments, **options)

    monkeypatch.setattr(csv_file, "write_atomic", slow)
    monkeypatch.setattr(csv_file.time, "perf_counter", lambda: now[0])
    for number in range(300):
        sink.log(number, {f"name {number // 10}": 1.0})
        now[0] += 1
    assert replaced == [1000.0, 1202.0]
    sink.flush()
    assert len(replaced) == 3
    sink.close()
    found = rows(path)
    assert (len(found[0]), [row[0] for row in found[1:]]) == (32, [str(number) for number in range(300)])
    assert all(len(row) == 32 and row[2 + number // 10] == "1.0" for number, row in enumerate(found[1:]))


@pytest.mark.parametrize("content", [b"", b"\0\xff,mine\n1\n", None])
def test_a_file_that_something_else_changed_is_a_warning(tmp_path, caplog, content):
    path, now = tmp_path / "metrics.csv", [0.0]
    sink = CsvSink(path, list, clock=lambda: now[0])
    sink.log(1, {"a": 1.0})
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    sink.log(2, {"b, \ud800": 2.0})
    sink.close()
    assert [record.message for record in caplog.records] == [
        f"{path} was changed by something else: its rows so far are left out; the next attempt writes them again"
    ]
    assert rows(path) == [["step", "time", "a", "b, ?"], ["2", "0.0", "", "2.0"]]
