from __future__ import annotations

import math

import pytest

from hpctrain.metrics.json_lines import JsonLinesSink
from hpctrain.status.metrics import LoggedMetrics, read_metrics


def test_what_the_sink_wrote_is_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonLinesSink(path, 0, clock=lambda: 12.5)
    sink.log(1, {"train/loss": math.inf, "train/lr": 0.5})
    sink.log(2, {"train/loss": 0.25})
    sink.close()
    assert list(read_metrics(path)) == [
        LoggedMetrics(1, 12.5, {"train/lr": 0.5, "train/loss": math.inf}),
        LoggedMetrics(2, 12.5, {"train/loss": 0.25}),
    ]


def test_without_a_file_there_are_no_records(tmp_path):
    assert list(read_metrics(tmp_path / "metrics.jsonl")) == []


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ('{"step": 1, "x": "' + "y" * 9000 + '"}\n{"step": 2}\n{"st', [2]),
        ("torn", []),
        ('{"step": 3}\n{"steps": 4}\n[5]\n{"step": "6"}\n', [3]),
    ],
)
def test_the_end_of_a_file_that_is_being_written(tmp_path, text, steps):
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    assert [record.step for record in read_metrics(path, last_bytes=4096)] == steps
