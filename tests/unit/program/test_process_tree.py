from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from hpctrain.program.processes import Process, describe_tree

THIS = Process.of(os.getpid())


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def started():
    """Start commands that print a line when they are ready; they are killed at the end."""
    processes = []

    def start(*command):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout.readline() == "ready\n"
        return Process.of(process.pid)

    yield start
    for process in processes:
        for one in [*Process(process.pid, 0).descendants()]:
            one.send(signal.SIGKILL)
        process.kill()
        process.communicate()


def test_a_process_and_its_descendants(started):
    shell = started("bash", "-c", "sleep 60 & echo ready; (sleep 61; true); true")
    # a child that was only forked still has the shell's command line
    wait_until(lambda: {"sleep 60", "sleep 61"} <= {one.command for one in shell.descendants()})
    wait_until(lambda: shell.state == "S")
    below = [*shell.descendants()]
    assert len(below) == 3
    assert shell in THIS.children()
    assert shell.is_shell
    assert not below[0].is_shell or below[0].command.startswith("bash")
    lines = describe_tree(shell).splitlines()
    assert len(lines) == 5
    assert lines[1].split()[:2] == [str(shell.pid), "S"]
    assert lines[1].endswith("(sleep 61; true); true")


def test_a_process_that_has_ended():
    with subprocess.Popen(["true"]) as process:
        ended = Process.of(process.pid)
        wait_until(lambda: not ended.alive)
        assert (ended.state, ended.alive, ended.children()) == ("", False, [])  # not reaped yet
    ended.send(signal.SIGKILL)
    assert Process.of(process.pid) is None
    # the number belongs to another process by now
    assert not Process(os.getpid(), THIS.started + 1).alive


@pytest.mark.parametrize(
    ("command", "number", "handles"),
    [
        (("bash", "-c", "echo ready; sleep 60; true"), signal.SIGTERM, False),
        (("bash", "-c", "echo ready; sleep 60; true"), signal.SIGINT, False),
        (("bash", "-c", "trap true TERM; echo ready; sleep 60; true"), signal.SIGTERM, True),
        (("bash", "-c", "trap true EXIT; echo ready; sleep 60; true"), signal.SIGTERM, False),
        (("dash", "-c", "trap true EXIT; echo ready; sleep 60; true"), signal.SIGTERM, False),
        (("dash", "-c", "trap true USR1; echo ready; sleep 60; true"), signal.SIGUSR1, True),
        ((sys.executable, "-Suc", "print('ready'); import time; time.sleep(60)"), signal.SIGTERM, False),
        ((sys.executable, "-Suc", "print('ready'); import time; time.sleep(60)"), signal.SIGINT, True),
    ],
)
def test_whether_a_process_handles_a_signal(started, command, number, handles):
    assert started(*command).handles(number) is handles


def test_the_reader_of_a_pipe(started):
    shell = started("bash", "-c", "echo ready; sleep 60 | cat; true")
    wait_until(lambda: {one.command for one in shell.children()} == {"sleep 60", "cat"})
    writer, reader = sorted(shell.children(), key=lambda one: one.command, reverse=True)
    assert (writer.command, reader.command) == ("sleep 60", "cat")
    assert reader.reads_from([writer, reader])
    assert not writer.reads_from([writer, reader])
