"""A watched process that behaves as its first argument says; the second is a folder for what it leaves."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

from hpctrain.config.health import Health
from hpctrain.rank import watchdog
from hpctrain.rank.rank import HostProgram
from hpctrain.rank.stop_request import StopRequest
from hpctrain.rank.watchdog import Watchdog
from hpctrain.run.stacks import answer, request_stacks
from hpctrain.run.times import STARTING, Times

HANG_TIMEOUT_S = 3
"""Longer than a busy machine lets a thread stand still."""
watchdog.REQUESTS_EVERY_S = 0.2
watchdog.OWN_ERROR_S = 2.5
moves = [0]
errors = [""]
times = Times(0.0)
stop = StopRequest()


def move(seconds):
    if times.doing in STARTING:
        times.first_step_done(0)
    for _ in range(int(seconds / 0.05)):
        moves[0] += 1
        time.sleep(0.05)


def stand(pause_s=0.1):
    while True:
        time.sleep(pause_s)


def hangs_after_a_step():
    move(0.3)
    stand(pause_s=0)


def hangs_before_the_first_step():
    stand()


def hangs_where_the_file_system_does():
    os.mkfifo(folder / "request")  # opening it blocks for ever, since no process writes to it
    move(3)
    stand()


def hangs_in_the_second_part_of_the_start():
    time.sleep(1.8)
    times.enter("first_step_s")
    stand()


def hangs_in_a_save():
    move(0.3)
    with times.during("save_s"):
        stand()


def hangs_after_an_evaluation():
    move(0.3)
    with times.during("eval_s"):
        pass
    stand()


def hangs_in_a_program():
    move(0.3)
    time.sleep(4)
    move(0.3)


def takes_its_time():
    time.sleep(4.5)
    move(0.3)
    with times.during("eval_s"):
        time.sleep(4.5)
    move(0.3)
    with times.during("save_s"):
        time.sleep(4.5)
    move(0.3)


def evaluates_batch_after_batch():
    with times.during("eval_s"):
        move(7.5)


def waits_its_turn():
    for _ in range(3):
        with times.during("save_s"):
            time.sleep(1.8)
        move(0.1)


def fails_to_record_it():
    move(0.3)
    stand()


def records_it_for_ever():
    watchdog.RECORD_HANG_S = 5
    move(0.3)
    stand()


def keeps_the_lock():
    move(0.3)
    ctypes.PyDLL(None).sleep(6)
    move(0.3)


def forks():
    move(0.3)
    child = os.fork()
    if child == 0:
        print(*(thread.name for thread in threading.enumerate()))
        time.sleep(4.5)
        sys.exit(7)
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        move(0.1)
    stand()


def is_suspended():
    move(0.3)
    print("ready", flush=True)
    time.sleep(1.8)
    move(0.3)


def loses_a_peer():
    move(0.3)
    errors[0] = "COMM_ERROR"
    stand()


def loses_a_peer_and_raises():
    move(0.3)
    errors[0] = "COMM_ERROR"
    move(1)
    raise RuntimeError("Connection closed by peer")


def loses_a_peer_and_takes_its_time_to_raise():
    move(0.3)
    errors[0] = "COMM_ERROR"
    try:
        raise LookupError("of its own")
    finally:
        move(4)  # longer than it may stand still


def loses_a_peer_in_a_program():
    move(0.3)
    errors[0] = "COMM_ERROR"
    move(2)


def is_asked():
    for _ in range(2):
        token = request_stacks(folder / "request")
        while answer(folder / "stacks", token) is None:
            move(0.1)
        print(token)


def blocks_signals():
    signal.signal(signal.SIGTERM, lambda *_: print("handled"))
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    move(0.3)
    os.kill(os.getpid(), signal.SIGTERM)
    move(0.3)
    print("unblocking")
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    move(0.1)


def is_cancelled():
    """With a library that takes the signals; the stop comes from the watchdog alone."""
    stop.install()
    move(0.3)
    previous = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while stop.pending is None:
        move(0.05)
    print(stop.last_signal.name, signal.getsignal(signal.SIGTERM) == previous)


class Rank:
    """What the watchdog reads of this process."""

    description = "rank 3 of 4 on here"

    def __init__(self, folder):
        self.times = times
        self.stop = stop
        claim = SimpleNamespace(is_cancelled=name == "is_cancelled")
        self.member = SimpleNamespace(claim=claim, stacks_request=folder / "request")
        self.stacks = folder / "stacks"
        self.program = HostProgram() if name.endswith("in_a_program") else None

    @property
    def progress(self):
        return moves[0]

    @property
    def communication_error(self):
        return errors[0]

    def record_communication_error(self, error):
        print("recorded", error, flush=True)

    def record_hang(self, message, position):
        if name == "fails_to_record_it":
            raise LookupError("no record")
        if name == "records_it_for_ever":
            stand()
        print(message, position.waits, position.stack, sep="\n", flush=True)


name, folder = sys.argv[1], Path(sys.argv[2])
bound_s = {"takes_its_time": 12, "hangs_after_an_evaluation": None}.get(name, HANG_TIMEOUT_S)
health = Health(hang_timeout_s=HANG_TIMEOUT_S, start_timeout_s=bound_s, eval_timeout_s=bound_s, save_timeout_s=bound_s)
with Watchdog(health, Rank(folder), tick_s=0.05):
    globals()[name]()
print("the end")
