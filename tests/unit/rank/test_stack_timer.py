from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpctrain.rank.stacks import ENDS_AFTER_S

PROGRAM = Path(__file__).parent / "programs" / "timed.py"


@pytest.mark.skipif(sys.platform != "linux", reason="the timer is Linux's")
def test_a_thread_that_runs_writes_its_stack_and_goes_on():
    done = subprocess.run([sys.executable, PROGRAM], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, "the end\n")
    stacks = done.stderr.split("Stack (most recent call first):\n")[1:]
    assert len(stacks) > 100
    assert all("timed.py" in stack and "in <module>" in stack for stack in stacks)
    assert not any("in call_on" in stack for stack in stacks)


@pytest.fixture(scope="module")
def locked():
    command = [sys.executable, PROGRAM.with_name("locked.py")]
    return lambda *words: subprocess.run([*command, *words], capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.skipif(sys.platform != "linux", reason="the timer is Linux's")
def test_a_process_that_keeps_the_lock_gets_an_alarm_which_is_taken_back_once_the_timer_is_postponed(locked):
    done = locked("awakes")
    assert (done.returncode, done.stdout.split()) == (0, ["0", str(ENDS_AFTER_S), "0", "1000"])
    assert done.stderr.count("in awakes\n") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="the timer is Linux's")
def test_a_users_program_gets_no_alarm(locked):
    done = locked("belongs_to_a_user")
    assert (done.returncode, done.stdout.split()) == (0, ["0"])
    assert done.stderr.count("in belongs_to_a_user\n") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="the timer is Linux's")
def test_a_process_that_continues_after_it_was_suspended_keeps_no_alarm():
    command = [sys.executable, PROGRAM.with_name("locked.py"), "is_suspended"]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) for _ in range(6)
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGSTOP)
    time.sleep(1.5)
    for process in processes:
        process.send_signal(signal.SIGCONT)
    assert [process.communicate(timeout=60)[0] for process in processes] == ["0\n"] * 6


@pytest.mark.nightly  # a minute
@pytest.mark.skipif(sys.platform != "linux", reason="the timer is Linux's")
def test_a_process_that_keeps_the_lock_for_ever_ends(locked):
    begin = time.monotonic()
    done = locked("keeps_it")
    assert (done.returncode, done.stdout) == (-signal.SIGALRM, "")
    assert ENDS_AFTER_S - 1 < time.monotonic() - begin < ENDS_AFTER_S + 30
    assert "in keeps_it\n" in done.stderr
