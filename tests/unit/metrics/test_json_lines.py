from __future__ import annotations

import json
import math
import tracemalloc

import pytest

from hpctrain.files import read_json_lines
from hpctrain.metrics.csv_file import CsvSink
from hpctrain.metrics.sink import JsonLinesSink
from hpctrain.status.metrics import read_metrics


def steps(path):
    return [record["step"] for record in read_json_lines(path)]


def test_a_record_is_on_disk_as_soon_as_it_is_logged(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonLinesSink(path, 0, clock=lambda: 1763.25)
    sink.log(20, {"train/loss": 0.5, "throughput/samples_per_s": 100.0})
    assert path.read_text() == '{"step": 20, "time": 1763.25, "train/loss": 0.5, "throughput/samples_per_s": 100.0}\n'
    sink.close()


def test_records_in_quick_succession_share_a_write_and_none_waits_for_long(tmp_path):
    path, now = tmp_path / "metrics.jsonl", [100.0]
    sink = JsonLinesSink(path, 0, clock=lambda: now[0])
    written = []
    for step in range(1, 11):
        sink.log(step, {"train/loss": 1.0 / step})
        written.append(len(steps(path)))
        now[0] += 0.03
    assert written == [1, 1, 1, 1, 5, 5, 5, 5, 9, 9]
    sink.log(10, {"eval/loss": 0.5})
    assert steps(path) == [*range(1, 11), 10]
    sink.log(11, {"train/loss": 0.1})
    assert len(steps(path)) == 11
    now[0] = 3.0  # the clock was set back
    sink.log(12, {"train/loss": 0.1})
    assert steps(path)[-2:] == [11, 12]
    sink.log(13, {"train/loss": 0.1})
    sink.flush()
    assert [(record["step"], record["time"]) for record in read_json_lines(path)][-1] == (13, 3.0)
    sink.close()


def test_values_that_json_lacks_are_null_and_spelled_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonLinesSink(path, 0, clock=lambda: 0.0)
    sink.log(1, {"train/loss": math.nan, "a": math.inf, "b": -math.inf, "train/lr": 0.1})
    sink.close()

    def refuse(constant):
        pytest.fail(f"{constant} is not JSON")

    record = json.loads(path.read_text(), parse_constant=refuse)
    assert record == {
        "step": 1,
        "time": 0.0,
        "train/loss": None,
        "a": None,
        "b": None,
        "train/lr": 0.1,
        "nonfinite": {"train/loss": "nan", "a": "inf", "b": "-inf"},
    }


def test_a_resume_drops_later_records_and_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = JsonLinesSink(path, 0)
    for step in (10, 20, 30, 40):
        first.log(step, {"train/loss": float(step)})
    first.close()
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step": 5, "time"')
    second = JsonLinesSink(path, 20)
    assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[:2])
    second.log(30, {"train/loss": 3.0})
    second.close()
    assert steps(path) == [10, 20, 30]


def test_a_whole_record_without_its_newline_counts_as_torn(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 10}\n{"step": 20}')
    JsonLinesSink(path, 20).close()
    assert steps(path) == [10]


def test_a_start_from_nothing_drops_everything(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 5}\n{"step": 10}\n')
    JsonLinesSink(path, 0).close()
    assert path.read_bytes() == b""


def test_a_superseded_attempt_does_not_write_into_the_new_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    old = JsonLinesSink(path, 0)
    old.log(10, {"train/loss": 1.0})
    new = JsonLinesSink(path, 10)
    old.log(20, {"train/loss": 99.0})
    new.log(20, {"train/loss": 2.0})
    old.close()
    new.close()
    assert [record["train/loss"] for record in read_json_lines(path)] == [1.0, 2.0]


def test_lines_that_are_not_records_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'[]\n{"time": 3}\n{"step": "7"}\n\x00\x00\n{"step": 7}\n')
    JsonLinesSink(path, 100).close()
    assert path.read_bytes() == b'{"step": 7}\n'


def test_a_resume_reads_a_long_run_in_little_memory(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}, "{"a" * 20_000}": 0.5}}\n' for step in range(800)))
    size = path.stat().st_size
    tracemalloc.start()
    try:
        JsonLinesSink(path, 799).close()
        csv = CsvSink(tmp_path / "metrics.csv", lambda: read_metrics(path, at_most=None))
        csv.log(800, {"eval/loss": 1.0})
        csv.close()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert path.stat().st_size == size
    assert csv_rows(tmp_path / "metrics.csv") == 802
    assert peak < size / 2


def csv_rows(path):
    return len(path.read_text().splitlines())
