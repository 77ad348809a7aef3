from __future__ import annotations

import fcntl
import io
import logging
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import tty
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from hpctrain.metrics.progress import Bar, BarSink, SharedStream, open_bar
from tests.unit.fakes import Clock

CLEAR = "\r\x1b[K"


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


@pytest.fixture
def bar(terminal):
    stream, _ = terminal
    clock = Clock(0.0)
    drawn = Bar(stream, clock=clock)
    drawn.clock = clock
    return drawn


def widen(stream, columns):
    fcntl.ioctl(stream.fileno(), termios.TIOCSWINSZ, struct.pack("HHHH", 25, columns, 0, 0))


def test_one_line_changes_and_evaluations_stay(terminal, bar):
    _, shown = terminal
    sink = BarSink(bar, 40, step=10, clock=bar.clock)
    values = {"train/loss": 0.12345, "train/lr": 0.1, "train/epoch": 2.7, "throughput/samples_per_s": 5210.4}
    bar.clock.now = 1.0
    sink.log(20, values)
    bar.clock.now += 1
    sink.show_step(21)
    sink.log(21, {"eval/loss": 2.0})
    bar.clock.now += 1
    sink.log(40, {"train/loss": 3.0})
    sink.close()
    figures = "epoch 2  5210 samples/s"
    last = "step 40/40 100%|██████████|  train/loss 3"
    assert shown() == (
        f"{CLEAR}step 20/40  50%|█████     |  eta 0:02  {figures}"
        f"{CLEAR}step 21/40  52%|█████▎    |  eta 0:03  {figures}"
        f"{CLEAR}step 21/40  eval/loss 2\n"
        f"{CLEAR}{last}{CLEAR}{last}\n"
    )


def test_the_line_ends_before_something_else_is_logged_and_an_echoed_ctrl_c_with_it(terminal, bar):
    stream, shown = terminal
    handler = logging.StreamHandler(stream)
    with bar.sharing_terminal([handler]):
        bar.draw("step 1/3", 1, 3)
        stream.write("^C")
        for text in ("stopping", "saved"):
            handler.handle(logging.makeLogRecord({"msg": text}))
        bar.draw("step 2/3", 2, 3)
    assert handler.filters == []
    line, last = f"{CLEAR}step 1/3  33%|███▎      |", f"{CLEAR}step 2/3  67%|██████▋   |"
    assert shown() == f"{line}^C{line}\nstopping\nsaved\n{last}{last}\n"


@contextmanager
def task_output(stream):
    """Standard output and error on the terminal, and a logger that a library made before the bar was drawn."""
    logger = logging.getLogger("a_library")
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    with redirect_stdout(stream), redirect_stderr(stream):
        yield logger
    logger.removeHandler(handler)


def test_what_a_task_prints_and_a_library_logs_has_lines_of_its_own(terminal, bar):
    stream, shown = terminal
    line = f"{CLEAR}step 1/3  33%|███▎      |"
    with task_output(stream) as logger, bar.sharing_terminal([]):
        for act in (
            lambda: print("printed"),
            lambda: print("to standard error", file=sys.stderr),
            lambda: print("without an end", end="", flush=True),
            lambda: sys.stdout.writelines(["several\n", "lines\n"]),
            lambda: logger.warning("logged"),
        ):
            bar.draw("step 1/3", 1, 3)
            act()
            sys.stdout.flush()
        print("last")
    texts = ["printed\n", "to standard error\n", "without an end\n", "several\nlines\n"]
    assert shown() == f"{''.join(f'{line}{CLEAR}{text}' for text in texts)}{line}{line}\nlogged\nlast\n"
    assert not isinstance(sys.stdout, SharedStream)


def test_a_bar_that_a_task_draws_takes_turns_with_this_one(terminal, bar):
    stream, shown = terminal
    with task_output(stream), bar.sharing_terminal([]):
        for done in (1, 2):
            bar.draw(f"step {done}", done, None)
            print(f"\rmine {done}", end="", flush=True)
        bar.draw("step 3", 3, None)
    assert shown() == f"{CLEAR}step 1\rmine 1{CLEAR}step 2\rmine 2{CLEAR}step 3{CLEAR}step 3\n"


def test_a_stream_that_a_task_replaced_stays(terminal, bar):
    stream, _ = terminal
    with task_output(stream):
        with bar.sharing_terminal([]):
            sys.stdout = mine = io.StringIO()
        assert (sys.stdout, sys.stderr) == (mine, stream)


def test_another_process_that_has_a_copy_leaves_the_line_alone(terminal, bar):
    _, shown = terminal
    bar.draw("step 1/3", 1, 3)
    bar._process = -1
    assert bar.make_room(logging.makeLogRecord({}))
    bar.announce("text")
    assert "\n" not in shown()


def test_it_is_drawn_twenty_times_a_second_at_most_and_at_the_last_step(terminal, bar):
    _, shown = terminal
    sink = BarSink(bar, 1000, clock=bar.clock)
    for step in range(1, 1001):
        bar.clock.now += 0.001
        sink.show_step(step)
    text = shown()
    assert 15 <= text.count("\r") <= 22
    assert "step 1000/1000 100%" in text.rpartition("\r")[2]


@pytest.mark.parametrize(("columns", "width"), [(20, 0), (60, 10), (150, 20)])
def test_a_long_line_never_wraps(terminal, bar, columns, width):
    stream, shown = terminal
    widen(stream, columns)
    BarSink(bar, 9, clock=bar.clock).log(9, {f"train/metric_{number}": 0.5 for number in range(50)})
    line = shown().removeprefix(CLEAR)
    assert len(line) <= columns - 1
    assert line.count("█") >= width


def test_names_cannot_control_the_terminal_nor_the_format(terminal, bar):
    stream, shown = terminal
    widen(stream, 200)
    BarSink(bar, 9, clock=bar.clock).log(3, {"train/{bar}\x1b[2J": 1.0})
    BarSink(bar, 9, clock=bar.clock).log(3, {"eval/\x1b[2J": 1.0})
    text = shown()
    assert r"train/{bar}\x1b[2J 1" in text
    assert text.count("\x1b") == 2


def test_what_takes_long_is_shown_with_the_time_that_is_left(terminal, bar):
    _, shown = terminal
    bar.draw("step 1/2", 1, 2)
    for done in range(1, 11):
        bar.clock.now += 0.1
        bar.show("evaluation", done, 10)
    bar.close()
    first, *later = shown().split(CLEAR)[2:]
    assert first == "evaluation 6/10  60%|██████    |  eta 0:00"
    assert later == [
        *(f"evaluation {done}/10 {done * 10:3d}%|{'█' * done}{' ' * (10 - done)}|  eta 0:00" for done in (7, 8, 9)),
        "evaluation 10/10 100%|██████████|",
        "",
    ]


def test_what_is_over_soon_is_not_shown_and_begins_again(terminal, bar):
    _, shown = terminal
    for _ in range(5):
        for done in (1, 2):
            bar.clock.now += 0.2
            bar.show("evaluation", done, 2)
    assert shown() == ""


def test_a_total_may_be_unknown_and_bytes_are_in_gb(terminal, bar):
    _, shown = terminal
    for done in (1, 2):
        bar.show("evaluation", done, None)
        bar.clock.now += 1
    bar.show("reading", 0, 4e9, in_gb=True)
    bar.clock.now += 1
    bar.show("reading", 1e9, 4e9, in_gb=True)
    assert shown() == f"{CLEAR}evaluation 2{CLEAR}reading 1.0/4.0 GB  25%|██▌       |  eta 0:03"


def test_a_stream_without_blocks_gets_ascii(tmp_path):
    with (tmp_path / "shown").open("w", encoding="ascii") as stream:
        Bar(stream).draw("step 1/2", 1, 2)
    assert (tmp_path / "shown").read_text() == "\n\x1b[Kstep 1/2  50%|#####     |"


def test_a_closed_pipe_ends_the_display_and_not_the_training(caplog):
    read_end, write_end = os.pipe()
    os.close(read_end)
    stream = os.fdopen(write_end, "w")
    bar = Bar(stream)
    for step in range(3):
        bar.draw("step", step, 3)
    bar.print_line("x")
    bar.close()
    assert len(caplog.records) == 1
    with pytest.raises(BrokenPipeError):
        stream.close()


def test_a_bar_is_drawn_on_a_terminal_or_where_it_is_asked_for_and_never_in_a_log(terminal):
    stream, _ = terminal
    with Path(os.devnull).open("w") as pipe:
        drawn = [
            (progress, output is stream)
            for progress in ("auto", "bar", "lines")
            for output in (stream, pipe)
            if open_bar(progress, output, is_log=False)
        ]
    assert drawn == [("auto", True), ("bar", True), ("bar", False)]
    assert open_bar("bar", stream, is_log=True) is None


def test_a_stream_that_cannot_tell_and_a_dumb_terminal_get_lines(terminal, monkeypatch):
    stream, _ = terminal
    for other in (object(), None):
        assert open_bar("auto", other, is_log=False) is None
    monkeypatch.setenv("TERM", "dumb")
    assert open_bar("auto", stream, is_log=False) is None
    assert open_bar("bar", stream, is_log=False) is not None


def test_the_library_that_draws_is_imported_only_where_a_bar_is_drawn():
    program = "import sys, hpctrain.metrics.progress; print('tqdm' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
