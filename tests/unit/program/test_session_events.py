from __future__ import annotations

import contextlib
import json
import logging
import math
import os

import pytest

from hpctrain.program.reports import LONGEST_LINE_BYTES, EventPipe, ProgramEvent, ProgramProgress


@pytest.fixture
def pipe(tmp_path):
    made = EventPipe(tmp_path)
    yield made
    made.close()


def read(pipe):
    pipe.read()
    events = list(pipe.waiting)
    pipe.waiting.clear()
    return events


def write(folder, *lines):
    descriptor = os.open(folder / "events", os.O_WRONLY | os.O_NONBLOCK)
    for line in lines:
        os.write(descriptor, line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n")
    os.close(descriptor)


def test_events_arrive_in_order(pipe, tmp_path):
    assert (pipe.read(), read(pipe)) == (False, [])
    write(tmp_path, {"event": "start", "rank": 0, "pid": 7, "total_steps": None, "stacks": True, "time": 1.5})
    write(tmp_path, {"event": "step", "rank": 0, "step": 1, "metrics": {"a": 1, "b": "nan", "c": "-inf"}})
    assert not pipe.read()
    events = read(pipe)
    assert [(one.kind, one.rank) for one in events] == [("start", 0), ("step", 0)]
    assert events[1].metrics == {"a": 1, "b": pytest.approx(math.nan, nan_ok=True), "c": -math.inf}


def test_a_line_in_two_parts(pipe, tmp_path):
    write(tmp_path, b'{"event": "st')
    assert read(pipe) == []
    write(tmp_path, b'ep", "step": 3}\n{"event"')
    assert [one.fields["step"] for one in read(pipe)] == [3]


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe",
        b"[]",
        b"7",
        b'{"event": "step"}',
        b'{"event": "step", "step": -1}',
        b'{"event": "step", "step": 1.5}',
        b'{"event": "step", "step": true}',
        b'{"event": "step", "step": 9007199254740993}',
        b'{"event": "step", "step": 1, "metrics": {"a": "many"}}',
        b'{"event": "step", "step": 1, "metrics": {"a": [1]}}',
        b'{"event": "step", "step": 1, "metrics": [1]}',
        b'{"event": "saved", "step": 1}',
        b'{"event": "saved", "step": 1, "path": "a\\u0000b"}',
        b'{"event": "start"}',
        b'{"event": "done", "rank": "zero"}',
        b'{"event": "exit"}',
        b'{"event": "else"}',
        b'{"event": ["step"]}',
        b"[" * 5000,
    ],
)
def test_malformed_lines_are_ignored_with_one_warning(pipe, tmp_path, caplog, line):
    with caplog.at_level(logging.WARNING):
        write(tmp_path, line + b"\n", line + b"\n", {"event": "done"})
        events = read(pipe)
    assert [one.kind for one in events] == ["done"]
    assert len(caplog.records) == 1


def test_a_line_without_an_end_is_dropped(pipe, tmp_path):
    write(tmp_path, b"x" * (LONGEST_LINE_BYTES + 1))
    assert read(pipe) == []
    write(tmp_path, b"\n", {"event": "done"})
    assert [one.kind for one in read(pipe)] == ["done"]


def test_the_pipe_stays_open_without_a_writer(pipe, tmp_path):
    for step in (1, 2):
        write(tmp_path, {"event": "step", "step": step})
        assert [one.fields["step"] for one in read(pipe)] == [step]
    assert read(pipe) == []


def test_a_full_pipe_is_read_again_at_once(pipe, tmp_path):
    line = json.dumps({"event": "step", "step": 1, "pad": "x" * 4000}).encode() + b"\n"
    descriptor = os.open(tmp_path / "events", os.O_WRONLY | os.O_NONBLOCK)
    written = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            written += os.write(descriptor, line)
    os.close(descriptor)
    assert pipe.read()
    assert len(pipe.waiting) == written // len(line) > 10


def test_progress_of_one_process():
    progress = ProgramProgress()
    for fields in (
        {"event": "start", "pid": 7, "stacks": True, "total_steps": 90},
        {"event": "step", "step": 41},
        {"event": "step", "step": 41},
        {"event": "step", "step": 42},
        {"event": "saved", "step": 42, "path": "x"},
        {"event": "stopping", "cause": "deadline"},
        {"event": "stopping", "cause": "SIGTERM"},
        {"event": "done"},
    ):
        progress.add(ProgramEvent.parse(json.dumps(fields).encode()))
    assert (progress.first_step, progress.step, progress.total_steps) == (41, 42, 90)
    assert (progress.changes, progress.done, progress.stopping) == (3, True, "deadline")
    assert progress.with_stacks == {7}


def test_progress_of_several_processes_is_that_of_the_lowest_rank():
    progress = ProgramProgress()
    for rank, step in ((3, 1), (2, 1), (3, 2), (3, 3)):
        progress.add(ProgramEvent("step", rank, {"step": step}))
    assert (progress.step, progress.changes) == (1, 4)
