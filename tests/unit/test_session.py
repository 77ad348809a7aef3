"""Programs that use a copy of hpctrain/session.py, in processes of their own, with the other end of the pipe here."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hpctrain import session

PREAMBLE = "import os, signal, sys, threading, time\nimport session\n"


class Reader:
    """hpctrain's end: the folder, and the pipe held open."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        os.mkfifo(folder / "events")
        self.pipe = os.open(folder / "events", os.O_RDWR | os.O_NONBLOCK)
        self.pending = b""

    def lines(self) -> list[bytes]:
        try:
            while data := os.read(self.pipe, 1 << 20):
                self.pending += data
        except BlockingIOError:
            pass
        *lines, self.pending = self.pending.split(b"\n")
        return lines

    def events(self):
        """What was reported on purpose."""
        return [event for event in map(json.loads, self.lines()) if event["event"] != "exit"]

    def wait_for(self, event, found=None):
        """Every event until one of this kind has come."""
        found = [] if found is None else found
        until = time.monotonic() + 20
        while not any(one["event"] == event for one in found):
            assert time.monotonic() < until, found
            time.sleep(0.005)
            found += self.events()
        return found

    def ask(self, **stop) -> None:
        (self.folder / "stop.new").write_text(json.dumps(stop))
        (self.folder / "stop.new").rename(self.folder / "stop")


@pytest.fixture
def reader(tmp_path):
    made = Reader(tmp_path / "session")
    yield made
    os.close(made.pipe)


@pytest.fixture
def start(tmp_path):
    """Start a program in a folder with a copy of the module, where hpctrain can't be imported."""
    shutil.copy(session.__file__, tmp_path)
    started = []

    def begin(text, reader=None, **variables):
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("HPCTRAIN", "RANK", "PYTHON"))
        }
        if reader is not None:
            variables["HPCTRAIN_SESSION"] = str(reader.folder)
        process = subprocess.Popen(
            # without site-packages
            [sys.executable, "-S", "-c", PREAMBLE + text],
            cwd=tmp_path,
            env=kept | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def ended(process, code=0):
    output, _ = process.communicate(timeout=30)
    assert process.returncode == code, output
    return output


def test_reports(start, reader):
    program = """
assert "hpctrain" not in sys.modules and "torch" not in sys.modules
session.start()
session.start()
session.start(total_steps=10)
session.step(1)
session.step(2, {"train/loss": 0.1, "count": 3, "bad": float("nan"), "worse": float("-inf")})
session.saved(2, "folder/step 2")
session.done()
"""
    begin = time.time()
    process = start(program, reader, RANK="3")
    ended(process)
    events = reader.events()
    assert all(begin <= event.pop("time") <= time.time() for event in events)
    assert {(event.pop("rank"), event.pop("pid")) for event in events} == {(3, process.pid)}
    metrics = {"train/loss": 0.1, "count": 3.0, "bad": "nan", "worse": "-inf"}
    assert events == [
        {"event": "start", "total_steps": None, "stacks": True},
        {"event": "start", "total_steps": 10, "stacks": True},
        {"event": "step", "step": 1},
        {"event": "step", "step": 2, "metrics": metrics},
        {"event": "saved", "step": 2, "path": str(reader.folder.parent / "folder" / "step 2")},
        {"event": "done"},
    ]


@pytest.mark.parametrize(
    ("end", "last"), [("sys.exit(3)", "exit"), ("raise ValueError", "exit"), ("os.abort()", "step")]
)
def test_a_process_that_ends_by_itself_says_so(start, reader, end, last):
    start(f"session.step(1)\n{end}", reader).wait(30)
    assert [json.loads(line)["event"] for line in reader.lines()][-1] == last


def test_nothing_without_hpctrain(start, tmp_path):
    program = """
session.start()
session.step(1, {"a": 1.0})
session.saved(1, "x")
session.done()
print(session.should_stop(), session.seconds_left(), session.run_dir(), session.attempt(), session.last_save())
print(session.checkpoint_dir("here/saves"))
"""
    assert ended(start(program)).splitlines() == ["False None None 1 None", "here/saves"]
    assert (tmp_path / "here" / "saves").is_dir()


def test_a_folder_that_is_not_there_is_reported_once(start, tmp_path):
    output = ended(start("session.start(); session.step(1); session.done()", HPCTRAIN_SESSION=f"{tmp_path}/none"))
    assert output.count("\n") == 1
    assert f"can't report to hpctrain: [Errno 2] No such file or directory: '{tmp_path}/none/events'" in output


def test_quick_steps_are_reported_now_and_then_and_the_newest_before_a_save(start, reader):
    program = """
for n in range(1, 2001):
    session.step(n)
session.saved(2000, "x")
session.step(2001)
"""
    ended(start(program, reader))
    events = reader.events()
    steps = [event["step"] for event in events if event["event"] == "step"]
    assert steps[0] == 1
    assert steps[-2:] == [2000, 2001]  # the last one by the end of the program
    assert steps == sorted(set(steps))
    assert len(steps) < 100
    assert [event["event"] for event in events[-3:]] == ["step", "saved", "step"]


def test_many_metrics_are_split_into_lines_that_the_kernel_keeps_whole(start, reader):
    ended(start("session.step(5, {f'layer/{n}/' + 'ä' * 20: n / 7 for n in range(200)})", reader))
    *lines, _ = reader.lines()
    assert len(lines) > 1
    assert max(map(len, lines)) < 4096
    found = {}
    for event in map(json.loads, lines):
        assert event["step"] == 5
        found |= event["metrics"]
    assert found == {f"layer/{n}/" + "ä" * 20: n / 7 for n in range(200)}


@pytest.mark.parametrize(
    ("call", "warning"),
    [
        ("session.step(1, {'a': [1], 'b': 2})", "the metric 'a' isn't a number, and is skipped: float() argument"),
        ("session.step(1, {'a': 10**400, 'b': 2})", "the metric 'a' isn't a number, and is skipped: int too large"),
        ("session.step(1, {'a' * 5000: 1, 'b': 2})", "a report has "),
    ],
)
def test_what_cannot_be_reported_is_skipped_with_one_warning(start, reader, call, warning):
    (line,) = ended(start(f"{call}\n{call}\nsession.done()", reader)).splitlines()
    assert line.startswith(f"hpctrain.session: {warning}")
    assert [event.get("metrics") for event in reader.events()] == [{"b": 2.0}, {"b": 2.0}, None]


@pytest.mark.parametrize(
    "value", [2, 2.0, np.int64(2), np.float32(2), np.array([2]), torch.tensor(2), torch.tensor([2.0]), Decimal(2)]
)
def test_whole_numbers_of_any_type(value):
    found = session._whole_number(value)
    assert (found, type(found)) == (2, int)


@pytest.mark.parametrize(
    "value",
    [1.5, -1, 2**53 + 1, 10**400, math.nan, math.inf, "2", None, [2], {}, 1j, np.ones(2), torch.ones(2), object],
)
def test_what_is_no_whole_number(value):
    with pytest.raises(ValueError, match=r"^expected a whole number from 0 to 2\*\*53, got \S"):
        session._whole_number(value)


def test_no_report_ends_the_training(start, reader):
    """All wrong arguments in one program, with one warning for each kind of problem."""
    program = """
class Odd:
    def __getattr__(self, name): raise OSError(name)
    __repr__ = __str__ = __index__ = __iter__ = None
numbers = [-1, 1.5, float("nan"), float("inf"), 10**400, 2**70, 1j]
wrong = [Odd(), None, "2", b"2", [2], {}, object, bytes(2), chr(0xdcff), *numbers]
for value in wrong:
    session.start(total_steps=value)
    session.step(value)
    session.step(1, value)
    session.step(1, {"a": value})
    session.step(1, {value: 1}) if value.__hash__ else None
    session.saved(value, "x")
    session.saved(1, value)
    session.checkpoint_dir(value)
session.start(1)
session.step()
session.done(1)
print(session.should_stop(), session.seconds_left(), session.attempt())
session.step(2.0, {"b": 2})
session.saved(2.0, b"x")
os.close(session._session.pipe)
session.step(3, {"c": 3})
session.done()
"""
    variables = {"HPCTRAIN_DEADLINE": "soon", "HPCTRAIN_STOP_SIGNAL": "STOPPING", "HPCTRAIN_ATTEMPT": "1st"}
    lines = ended(start(program, reader, RANK="abc", **variables)).splitlines()
    assert "False None 1" in lines
    warnings = [line.removeprefix("hpctrain.session: ") for line in lines if line != "False None 1"]
    assert len({" ".join(line.split()[:4]) for line in warnings}) == len(warnings)
    for name in (*variables, "RANK"):
        assert any(f"expected the variable {name} to be" in line for line in warnings)
    for call in ("start", "step", "saved", "done"):
        assert any(f"a call of {call}() is skipped: " in line for line in warnings)
    events = reader.events()
    assert {event["rank"] for event in events} == {0}
    assert [event for event in events if event.get("metrics") == {"b": 2.0}][-1]["step"] == 2
    assert (events[-1]["event"], events[-1]["step"]) == ("saved", 2)


def test_nothing_of_the_system_ends_the_training(start, reader):
    """A file where the stacks and the saves belong, a request that makes no sense, and no standard error."""
    (reader.folder / "stop").write_text('["deadline"]')
    program = f"""
os.mkdir({str(reader.folder)!r} + f"/stacks_{{os.getpid()}}")
open("file", "w").close()
session.start()
session.checkpoint_dir("file/saves")
print(session.seconds_left(), session.should_stop())
sys.stderr.close()
session.step(1.5)
sys.stderr = None
session.saved(1.5, "x")
sys.stderr = object()
session.done(1)
session.done()
sys.stderr = None
"""
    output = ended(start(program, reader)).splitlines()
    assert [line.rpartition(": ")[0] for line in output] == [
        "hpctrain.session: can't handle signals: [Errno 21] Is a directory",
        "hpctrain.session: the folder for saves can't be made: [Errno 20] Not a directory",
        "",
    ]
    assert output[-1] == "None True"
    assert [event["event"] for event in reader.events()] == ["start", "stopping", "done"]


def test_ranks_that_can_not_agree_are_never_told_to_stop(monkeypatch, capsys):
    class Distributed:
        group = SimpleNamespace(WORLD=None)

        @staticmethod
        def new_group(**_):
            raise RuntimeError("no gloo")

        get_rank = staticmethod(lambda: 0)
        get_world_size = staticmethod(lambda: 2)
        is_available = is_initialized = staticmethod(lambda: True)

    now = session._Session()
    now.started = True
    now.signalled = "SIGTERM"
    monkeypatch.setattr(session, "_session", now)
    monkeypatch.setitem(sys.modules, "torch.distributed", Distributed)
    assert [session.should_stop(), session.should_stop()] == [False, False]
    assert capsys.readouterr().err.count("the ranks can't agree on a stop, so should_stop() stays False: no gloo") == 1


LOOP = """
session.start()
n = 0
while not session.should_stop():
    n += 1
    session.step(n)
    time.sleep(0.001)
print("stopped", session.seconds_left(), flush=True)
assert session.should_stop()
"""


def test_a_signal_stops_and_reaches_the_earlier_handler(start, reader):
    earlier = "signal.signal(signal.SIGTERM, lambda number, frame: print('earlier', number, flush=True))"
    process = start(earlier + LOOP, reader)
    found = reader.wait_for("step")
    process.send_signal(signal.SIGTERM)
    assert ended(process) == "earlier 15\nstopped None\n"
    found += reader.events()
    assert (found[-1]["event"], found[-1]["cause"]) == ("stopping", "SIGTERM")
    steps = [event["step"] for event in found if event["event"] == "step"]
    assert found[-2]["step"] == steps[-1]  # the newest step comes first


def test_another_stop_signal(start, reader):
    process = start(LOOP, reader, HPCTRAIN_STOP_SIGNAL="INT")
    reader.wait_for("step")
    process.send_signal(signal.SIGINT)
    assert ended(process) == "stopped None\n"


def test_the_file_stops_and_has_the_deadline(start, reader):
    process = start(LOOP, reader, HPCTRAIN_DEADLINE=str(time.time() + 9000))
    found = reader.wait_for("step")
    reader.ask(signal="SIGTERM", time=time.time(), deadline=time.time() + 100)
    assert 50 < float(ended(process).split()[1]) < 100
    found += reader.events()
    assert found[-1]["cause"] == "stop"


def test_a_near_deadline_stops(start, reader):
    process = start(LOOP, reader, HPCTRAIN_DEADLINE=str(time.time() + 0.4))
    assert 0 <= float(ended(process).split()[1]) < 0.1
    assert reader.events()[-1]["cause"] == "deadline"


def test_started_in_another_thread_it_watches_the_file(start, reader):
    program = """
earlier = signal.getsignal(signal.SIGTERM)
thread = threading.Thread(target=session.start)
thread.start()
thread.join()
assert signal.getsignal(signal.SIGTERM) is earlier
"""
    process = start(program + LOOP.replace("session.start()", ""), reader)
    events = reader.wait_for("step")
    assert events[0]["stacks"] is False
    reader.ask(signal="SIGTERM", time=time.time(), deadline=None)
    assert ended(process) == "stopped None\n"


def test_a_forked_process_neither_reports_nor_answers(start, reader):
    program = """
session.start()
session.step(1)
child = os.fork()
if not child:
    session.step(99, {"a": 1})
    session.saved(99, "x")
    os.kill(os.getppid(), signal.SIGTERM)
    os.write(1, b"%d\\n" % session.should_stop())
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
print(os.waitpid(child, 0)[1], session.should_stop())
session.done()
"""
    earlier = "signal.signal(signal.SIGUSR1, signal.SIG_IGN)"
    assert ended(start(earlier + program, reader)) == f"0\n{int(signal.SIGTERM)} True\n"
    assert [event["event"] for event in reader.events()] == ["start", "step", "stopping", "done"]


def test_a_forked_process_that_starts_it_is_a_program_of_its_own(start, reader):
    program = """
session.start()
child = os.fork()
session.start()
session.step(1 + (child == 0))
if child:
    os.waitpid(child, 0)
"""
    ended(start(program, reader))
    events = reader.events()
    assert len({event["pid"] for event in events if event["event"] == "start"}) == 2
    assert sorted(event["step"] for event in events if event["event"] == "step") == [1, 2]


def test_a_full_pipe_drops_steps_and_delays_what_counts(start, reader):
    program = """
session.STEP_EVERY_S = 0.0
for n in range(1, 3001):
    session.step(n)
print("full", flush=True)
session.saved(3000, "x" * 3000)
session.done()
"""
    process = start(program, reader)
    assert process.stdout.readline() == "full\n"
    time.sleep(0.05)
    assert process.poll() is None
    found = reader.wait_for("done")
    ended(process)
    steps = [event["step"] for event in found if event["event"] == "step"]
    # a line may still fit when the pipe is almost full, since the time in it has fewer digits
    assert steps[:500] == list(range(1, 501))
    assert steps == sorted(set(steps))
    assert len(steps) < 3000


def test_a_reader_that_hangs_costs_one_wait(start, reader):
    program = """
session.METRICS_WAIT_S = 0.3
begin = time.monotonic()
for n in range(1, 3001):
    session.step(n, {"train/loss": 1 / n})
print(time.monotonic() - begin)
"""
    assert 0.3 <= float(ended(start(program, reader))) < 30  # and not 0.3 s per report


def test_a_reader_that_has_gone_is_left_alone(start, tmp_path):
    reader = Reader(tmp_path / "session")
    process = start("session.step(1)\nsys.stdin = open('go')\nsession.step(2, {'a': 1})\nsession.done()", reader)
    os.mkfifo(tmp_path / "go")
    reader.wait_for("step")
    os.close(reader.pipe)
    (tmp_path / "go").write_text("")
    assert ended(process) == ""


@pytest.mark.parametrize("handled", [False, True])
def test_stacks_unless_the_program_handles_the_signal(start, reader, handled):
    earlier = "signal.signal(signal.SIGUSR1, lambda *_: print('own'))" if handled else ""
    process = start(earlier + LOOP, reader)
    (event, *_) = reader.wait_for("step")
    assert event["stacks"] is not handled
    process.send_signal(signal.SIGUSR1)
    stacks = reader.folder / f"stacks_{process.pid}"
    until = time.monotonic() + 20
    while not handled and not (stacks.exists() and "most recent call first" in stacks.read_text()):
        assert time.monotonic() < until
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    assert ended(process).startswith("own" if handled else "stopped")


def test_a_signal_handler_of_the_program_may_report(start, reader):
    """In the middle of another report, too: there is no lock that it could wait for."""
    program = """
def handler(number, frame):
    session.saved(7, "x")
    signal.setitimer(signal.ITIMER_REAL, 0.001)  # not before: while the reader is slow, handlers would pile up
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.001)
until = time.monotonic() + 0.2
while time.monotonic() < until:
    session.step(1, {"a": 1})
signal.signal(signal.SIGALRM, signal.SIG_IGN)
session.done()
"""
    process = start(program, reader)
    found = reader.wait_for("done")
    ended(process)
    assert {event["event"] for event in found} == {"step", "saved", "done"}


def test_the_newest_save_that_exists(tmp_path, monkeypatch):
    monkeypatch.setenv("HPCTRAIN_RUN_DIR", str(tmp_path))
    assert session.last_save() is None
    (tmp_path / "checkpoints").mkdir()
    elsewhere = tmp_path / "elsewhere.pt"
    for path in (elsewhere, tmp_path / "checkpoints" / "a.pt"):
        path.touch()
    records = [(3, "checkpoints/a.pt"), (5, str(elsewhere)), (9, "checkpoints/removed.pt")]
    lines = [json.dumps({"step": step, "path": path, "time": 1.0, "attempt": 1}) for step, path in records]
    (tmp_path / "saves.jsonl").write_text("\n".join([*lines, '{"step": 12, "pa']))
    assert session.last_save() == (5, elsewhere)
    elsewhere.unlink()
    assert session.last_save() == session.Save(3, tmp_path / "checkpoints" / "a.pt")


def test_records_of_saves_that_someone_has_edited_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setenv("HPCTRAIN_RUN_DIR", str(tmp_path))
    (tmp_path / "a.pt").touch()
    odd = [
        {"step": 6, "path": "x" * 300},
        {"step": 7},
        [],
        8,
        None,
        {"step": "9", "path": "a.pt"},
        {"step": 9, "path": 9},
    ]
    lines = [json.dumps(one).encode() for one in [{"step": 5, "path": "a.pt"}, *odd]]
    (tmp_path / "saves.jsonl").write_bytes(b"\n".join([*lines, b"\xff", b'{"step": 9, "path": "\\u0000"}']))
    assert session.last_save() == (5, tmp_path / "a.pt")


def test_what_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.setenv("HPCTRAIN_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("HPCTRAIN_CHECKPOINT_DIR", str(tmp_path / "saves"))
    monkeypatch.setenv("HPCTRAIN_ATTEMPT", "3")
    assert (session.run_dir(), session.checkpoint_dir(), session.attempt()) == (tmp_path, tmp_path / "saves", 3)
    assert (tmp_path / "saves").is_dir()
    assert math.isinf(session._session.deadline)


def test_a_shell_reports(reader):
    line = '{"event":"step","step":12,"metrics":{"loss":0.5}}'
    shell = f"""echo '{line}' > "$HPCTRAIN_SESSION/events" """
    subprocess.run(["sh", "-c", shell], env={**os.environ, "HPCTRAIN_SESSION": str(reader.folder)}, check=True)
    assert reader.events() == [json.loads(line)]


def test_it_is_part_of_the_package_without_torch():
    program = "from hpctrain import session; import sys; print('torch' in sys.modules, session.attempt())"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "False 1\n"
