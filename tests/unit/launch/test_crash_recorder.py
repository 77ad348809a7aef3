from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from hpctrain.launch.crash_recorder import crash_recorder
from hpctrain.run.process import process_start


@pytest.fixture
def concluded(tmp_path):
    """A function that a recorder calls, and one that waits until it has."""
    path = tmp_path / "concluded"

    def wait(seconds=20.0):
        deadline = time.monotonic() + seconds
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        return path.exists()

    return lambda crash: path.write_text("" if crash is None else crash.name), wait


def in_a_process(act):
    """The exit code of a process that does something, negative for a signal."""
    pid = os.fork()
    if not pid:
        faulthandler.disable()  # pytest's would print a crash that is meant
        try:
            act()
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize(
    ("die", "code"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), -signal.SIGKILL),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), -signal.SIGSEGV),
        (lambda: os.kill(os.getpid(), signal.SIGFPE), -signal.SIGFPE),
        (lambda: os._exit(0), 1),
        (lambda: os._exit(7), 7),
    ],
    ids=["killed", "crash", "division", "exit 0", "exit 7"],
)
def test_a_death_is_concluded_by_the_recorder(concluded, die, code):
    conclude, wait = concluded

    def act():
        with crash_recorder(conclude):
            die()

    assert in_a_process(act) == code
    assert wait()


def test_a_program_may_have_no_standard_output(concluded, monkeypatch):
    conclude, wait = concluded
    monkeypatch.setattr(sys, "stdout", None)
    with crash_recorder(conclude):
        pass
    assert not wait(0.1)


def test_an_end_leaves_no_recorder_and_nothing_changed(concluded):
    conclude, wait = concluded
    before, others = os._exit, children()
    with crash_recorder(conclude):
        # a loading process ends in this way
        assert in_a_process(lambda: os._exit(0)) == 0
    assert os._exit is before
    assert children() == others
    assert not wait(0.3)


def test_the_signals_of_the_terminal_leave_the_recorder(concluded):
    conclude, wait = concluded

    def act():
        os.setsid()
        with crash_recorder(conclude):
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
                os.killpg(0, number)
            os.killpg(0, signal.SIGKILL)

    assert in_a_process(act) == -signal.SIGKILL
    assert wait()


def children():
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def test_the_recorder_keeps_no_file_and_no_port(concluded, tmp_path):
    conclude, _ = concluded
    others = set(children())
    with (tmp_path / "file").open("w"), socket.create_server(("127.0.0.1", 0)), crash_recorder(conclude):
        (recorder,) = set(children()) - others
        others = [path.readlink() for path in Path(f"/proc/{recorder}/fd").iterdir() if int(path.name) > 2]
    (pipe,) = others
    assert str(pipe).startswith("pipe:")


@pytest.mark.parametrize(("number", "known"), [(signal.SIGABRT, "SIGABRT"), (signal.SIGKILL, "")])
def test_the_signal_of_a_crash_is_concluded_and_its_stack_printed(tmp_path, capfd, number, known):
    concluded = tmp_path / "concluded"

    def act():
        with crash_recorder(lambda crash: concluded.write_text(f"{crash and crash.name}\n")):
            os.kill(os.getpid(), number)

    assert in_a_process(act) == -number
    deadline = time.monotonic() + 20
    while not (concluded.exists() and concluded.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert concluded.read_text() == f"{known or None}\n"
    stack = capfd.readouterr().err
    assert ("Fatal Python error: Aborted" in stack, "in act" in stack) == (bool(known), bool(known))


@pytest.mark.parametrize("take", [lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN), lambda: reap(children())])
def test_a_task_that_takes_the_recorders_end_disturbs_nothing(concluded, take):
    conclude, _ = concluded

    def act():
        with crash_recorder(conclude):
            take()
        os._exit(5)

    assert in_a_process(act) == 5


def reap(pids):
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("where", ["after_in_child", "after_in_parent"])
def test_a_ctrl_c_at_the_fork_neither_runs_the_program_twice_nor_leaves_the_recorder(concluded, tmp_path, where):
    conclude, wait = concluded
    interrupted, forks = tmp_path / "interrupted", tmp_path / "forks"

    def interrupt():
        with forks.open("a") as file:
            file.write("x")
        os.kill(os.getpid(), signal.SIGINT)

    def act():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.register_at_fork(**{where: interrupt})
        try:
            with crash_recorder(conclude):
                pass
        except KeyboardInterrupt:
            with interrupted.open("a") as file:
                file.write("x")
        os._exit(6 if children() else 5)

    assert in_a_process(act) == 5
    assert forks.read_text() == "x"
    # the group's Ctrl-C reaches both; the one that the recorder gets is blocked
    assert interrupted.exists() is (where == "after_in_parent")
    assert not wait(0.3)


def test_a_recorder_that_can_not_conclude_ends(tmp_path, monkeypatch):
    monkeypatch.setattr("hpctrain.launch.crash_recorder.CONCLUDE_S", 1)
    lock = threading.Lock()
    pid = tmp_path / "pid"

    def conclude(_crash):
        pid.write_text(str(os.getpid()))
        lock.acquire()

    def act():
        # as another thread may have at the fork
        lock.acquire()
        with crash_recorder(conclude):
            os.kill(os.getpid(), signal.SIGKILL)

    in_a_process(act)
    deadline = time.monotonic() + 20
    while not (pid.exists() and pid.read_text() and not is_alive(pid.read_text())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(pid.read_text())


def is_alive(pid):
    return process_start(int(pid)) is not None
