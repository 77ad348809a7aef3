from __future__ import annotations

import os
import signal
import time

import pytest

from hpctrain.launch.witness import witnessed


@pytest.fixture
def concluded(tmp_path):
    """A function that a witness calls, and one that waits until it has."""
    path = tmp_path / "concluded"

    def wait(seconds=20.0):
        deadline = time.monotonic() + seconds
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        return path.exists()

    return path.touch, wait


def in_a_process(act):
    """The exit code of a process that does something, negative for a signal."""
    pid = os.fork()
    if not pid:
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
        (lambda: os._exit(0), 1),
        (lambda: os._exit(7), 7),
    ],
    ids=["killed", "crash", "exit 0", "exit 7"],
)
def test_a_death_is_concluded_by_the_witness(concluded, die, code):
    conclude, wait = concluded

    def act():
        with witnessed(conclude):
            die()

    assert in_a_process(act) == code
    assert wait()


def test_an_end_leaves_no_witness_and_nothing_changed(concluded):
    conclude, wait = concluded
    before = os._exit
    with witnessed(conclude):
        # a loading process ends in this way
        assert in_a_process(lambda: os._exit(0)) == 0
    assert os._exit is before
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
    assert not wait(0.3)


def test_the_signals_of_the_terminal_leave_the_witness(concluded):
    conclude, wait = concluded

    def act():
        os.setsid()
        with witnessed(conclude):
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
                os.killpg(0, number)
            os.killpg(0, signal.SIGKILL)

    assert in_a_process(act) == -signal.SIGKILL
    assert wait()
