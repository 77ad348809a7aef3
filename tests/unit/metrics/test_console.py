from __future__ import annotations

import io
import logging
import os
import pty
import re
import select
import tty

import pytest
from fakes import Clock

from hpctrain.metrics.console import ConsoleSink, duration


@pytest.fixture
def terminal():
    master, slave = pty.openpty()
    tty.setraw(slave)

    def shown() -> str:
        text = b""
        while select.select([master], [], [], 0.1)[0]:
            text += os.read(master, 65536)
        return text.decode()

    with os.fdopen(slave, "w") as stream:
        yield stream, shown
    os.close(master)


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


def test_a_terminal_shows_one_line_that_changes_and_keeps_evaluations(terminal):
    stream, shown = terminal
    clock = Clock(0.0)
    sink = ConsoleSink(stream, 30, step=30, clock=clock)
    for step in (10, 20):
        clock.now += 1
        sink.log(step, {"train/loss": 1.0})
    sink.log(20, {"eval/loss": 2.0})
    clock.now += 1
    sink.log(30, {"train/loss": 3.0})
    sink.close()
    assert shown() == (
        "\r\x1b[Kstep 10/30  train/loss 1"
        "\r\x1b[Kstep 20/30  train/loss 1"
        "\r\x1b[Kstep 20/30  eval/loss 2\n"
        "\r\x1b[Kstep 30/30  train/loss 3"
        "\r\x1b[Kstep 30/30  train/loss 3\n"
    )


def test_the_progress_line_ends_before_something_else_is_logged_and_an_echoed_ctrl_c_with_it(terminal):
    stream, shown = terminal
    sink = ConsoleSink(stream, 30, clock=Clock(0.0))
    handler = logging.StreamHandler(stream)
    handler.addFilter(sink.make_room)
    sink.log(10, {"train/loss": 1.0})
    stream.write("^C")
    for text in ("stopping", "saved"):
        handler.handle(logging.makeLogRecord({"msg": text}))
    sink.close()
    line = "\r\x1b[Kstep 10/30  train/loss 1  eta 0:00"
    assert shown() == f"{line}^C{line}\nstopping\nsaved\n"


def test_lines_of_a_log_have_the_time():
    stream = io.StringIO()
    ConsoleSink(stream, 30, stamped=True).log(30, {"eval/loss": 0.5})
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d step 30/30  eval/loss 0.5\n", stream.getvalue())


def test_a_terminal_is_redrawn_twenty_times_a_second_at_most(terminal):
    stream, shown = terminal
    clock = Clock(0.0)
    sink = ConsoleSink(stream, 1000, clock=clock)
    for step in range(1, 1001):
        clock.now += 0.001
        sink.log(step, {})
    text = shown()
    assert 15 <= text.count("\r") <= 22
    assert text.endswith("step 1000/1000")


def test_a_long_line_never_wraps(terminal):
    stream, shown = terminal
    ConsoleSink(stream, 9).log(1, {f"train/metric_{number}": 0.5 for number in range(50)})
    assert len(shown()) <= len("\r\x1b[K") + 79


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
