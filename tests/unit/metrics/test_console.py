from __future__ import annotations

import io
import os
import re

import pytest

from hpctrain.metrics.progress import ConsoleSink, duration, own_metrics
from tests.unit.fakes import Clock


def test_a_log_gets_a_plain_line_at_each_step():
    clock, stream = Clock(0.0), io.StringIO()
    sink = ConsoleSink(stream, 460, clock=clock)
    clock.now = 6.0
    sink.log(
        120,
        {
            "train/epoch": 2.7,
            "train/loss": 0.12345,
            "train/lr": 0.001,
            "throughput/samples_per_s": 5210.4,
            "throughput/steps_per_s": 20.0,
        },
    )
    sink.log(130, {"eval/loss": 0.25, "eval/accuracy": 0.9712})
    sink.close()
    assert stream.getvalue().splitlines() == [
        "step 120/460  epoch 2  train/loss 0.1235  5210 samples/s  eta 0:17",
        "step 130/460  eval/loss 0.25  eval/accuracy 0.9712",
    ]


def test_a_log_gets_a_line_per_second_every_evaluation_and_the_last_step():
    clock, stream = Clock(0.0), io.StringIO()
    sink = ConsoleSink(stream, 50, clock=clock)
    for step, name in ((10, "train/loss"), (20, "train/loss"), (20, "eval/loss"), (30, "train/loss")):
        sink.log(step, {name: 1.0})
        clock.now += 0.6
    sink.log(40, {"train/loss": 1.0})
    sink.log(50, {"train/loss": 1.0})
    assert [line.split("  eta")[0] for line in stream.getvalue().splitlines()] == [
        "step 10/50  train/loss 1",
        "step 20/50  eval/loss 1",
        "step 40/50  train/loss 1",
        "step 50/50  train/loss 1",
    ]


def test_the_eta_counts_this_attempts_steps_only():
    clock, stream = Clock(0.0), io.StringIO()
    sink = ConsoleSink(stream, 200, step=100, clock=clock)
    clock.now = 10.0
    sink.log(110, {})
    sink.log(200, {})
    assert stream.getvalue().splitlines() == ["step 110/200  eta 1:30", "step 200/200"]


def test_lines_of_a_log_have_the_time():
    stream = io.StringIO()
    ConsoleSink(stream, 30, stamped=True).log(30, {"eval/loss": 0.5})
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d step 30/30  eval/loss 0.5\n", stream.getvalue())


def test_a_closed_pipe_ends_the_display_and_not_the_training(caplog):
    read_end, write_end = os.pipe()
    os.close(read_end)
    stream = os.fdopen(write_end, "w")
    sink = ConsoleSink(stream, 9)
    for step in range(3):
        sink.log(step, {"train/loss": 1.0})
    sink.close()
    assert len(caplog.records) == 1
    with pytest.raises(BrokenPipeError):
        stream.close()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0:00"), (12, "0:12"), (59.7, "1:00"), (3723, "1:02:03"), (273_900, "3d 04:05")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_of_many_metrics_a_line_has_the_loss_and_some_others():
    values = {f"train/{number:02}": 1.0 for number in range(30)} | {"train/loss": 0.5}
    words = own_metrics(values)
    assert (len(words), words[0], words[1], words[-1]) == (13, "train/loss 0.5", "train/00 1", "and 19 more")
    assert own_metrics({"train/loss": 0.5, "train/a": 1.0}) == ["train/loss 0.5", "train/a 1"]
