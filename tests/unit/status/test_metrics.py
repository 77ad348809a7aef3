from __future__ import annotations

import math
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.metrics.sink import JsonLinesSink
from hpctrain.status.metrics import NO_METRICS, LoggedMetrics, last_metrics, read_metrics


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


LINES = st.sampled_from(
    [
        '{"step": 1, "time": 2.5, "train/loss": 0.5}',
        '{"step": 2, "time": "?", "train/loss": null, "nonfinite": {"train/loss": "nan"}}',
        '{"step": 3, "eval/loss": null, "train/lr": 1}',
        '{"step": 4, "eval/loss": 0.25, "text": "a \\"train/lr\\": 3"}',
        '{"step": 5, "t\\u00e4/\\ud800": 7, "train/lr": 2}',
        '{"step": 6, "ä": 7, "train/lr": "slow"}',
        '{"step": 7, "train/l',
        '{"step": -1, "train/lr": 4}',
        "[1]",
        "",
    ]
)
SOME = ("train/loss", "train/lr")


@given(st.lists(LINES, max_size=8), st.integers(1, 400))
def test_the_last_values_are_those_of_reading_every_record(lines, last_bytes):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        path.write_text("\n".join(lines))
        records = list(read_metrics(path, last_bytes=last_bytes))
        found = last_metrics(path, last_bytes=last_bytes)
        some = last_metrics(path, last_bytes=last_bytes, names=SOME)
    if not records:
        assert found is some is NO_METRICS
        return
    values = {}
    for record in records:
        values |= record.values
    assert (found.step, found.time, str(sorted(found.values.items()))) == (
        records[-1].step,
        records[-1].time,
        str(sorted(values.items())),
    )
    assert (some.step, some.time) == (found.step, found.time)
    assert [str(some.values.get(name)) for name in SOME] == [str(values.get(name)) for name in SOME]


def test_without_a_file_there_is_no_last_record(tmp_path):
    assert last_metrics(tmp_path / "absent", last_bytes=10) is NO_METRICS
