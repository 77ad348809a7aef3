from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import pytest

from hpctrain.rank.stacks import StackPosition

PROGRAM = """
def {name}():
    lock.acquire()

def main():
    {name}()
"""


@contextmanager
def a_thread_in(name, path):
    """A thread that waits, below Python, in a function of this name in a file of this path."""
    lock = threading.Lock()
    names = {"lock": lock}
    exec(compile(PROGRAM.format(name=name), path, "exec"), names)
    with lock:
        thread = threading.Thread(target=names["main"])
        thread.start()
        yield thread
    thread.join()


def position(thread, name):
    """Where the thread stands once it has come to the function."""
    for _ in range(1000):
        found = StackPosition.of(thread.ident)
        if found.text.startswith(f"{name} ") and found.text.endswith(":3"):  # where it waits
            break
        time.sleep(0.005)
    return found


@pytest.mark.parametrize(
    ("name", "path", "waits"),
    [
        ("all_reduce", "/site-packages/torch/distributed/distributed_c10d.py", True),
        ("decide", "/site-packages/hpctrain/rank/agreement.py", True),
        ("_engine_run_backward", "/site-packages/torch/autograd/graph.py", True),
        ("forward", "/site-packages/torch/nn/parallel/distributed.py", True),
        ("loss", "/home/me/task.py", False),
        ("get", "/site-packages/torch/utils/data/dataloader.py", False),
    ],
)
def test_the_innermost_function_shows_whether_others_are_waited_for(name, path, waits):
    with a_thread_in(name, path) as thread:
        found = position(thread, name)
    assert found.text == f"{name} in {path}:3"
    assert found.waits is waits
    assert f'File "{path}", line 6, in main' in found.stack


def test_a_thread_that_has_ended_has_no_position():
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    assert StackPosition.of(thread.ident) == StackPosition("a thread that has ended", "", waits=False)
