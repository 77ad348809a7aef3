"""A program of another user, which tries to get into a meeting of ranks."""

from __future__ import annotations

import functools
import json
import os
import socket
import tempfile
import time
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import TCPStore

from hpctrain.rank.private_folder import FILE_NAME
from tests.multiprocess.programs.other_user import become

NOBODY = 65_534


def as_nobody(attack):
    """Have a process of that user do it, which can't write the result by itself."""

    @functools.wraps(attack)
    def run(*arguments):
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            code = 1
            try:
                become(NOBODY)
                os.write(writer, json.dumps(attack(*arguments)).encode())
                code = 0
            finally:
                os._exit(code)
        os.close(writer)
        assert os.waitpid(pid, 0)[1] == 0
        return json.loads(os.read(reader, 1 << 16))

    return run


def connected(port):
    give_up = time.monotonic() + 30
    while True:
        try:
            return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5))
        except RuntimeError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.02)


@as_nobody
def take_place(port, evil):
    """Answer in place of rank one, as soon as rank zero has announced itself; returns the keys that were found."""
    store = connected(port)
    store.wait(["hpctrain/zero"])
    zero = store.get("hpctrain/zero")
    # what rank zero itself has proved, said back to it; and any bytes
    for forged in (zero, zero[:32] + b"nonce" * 4, bytes.fromhex(evil)):
        store.set("hpctrain/rank/1", forged)
        time.sleep(0.3)
    return {"keys": store.list_keys(), "welcome": store.check(["hpctrain/rank/1/welcome"])}


@as_nobody
def enter(port, name):
    """Look for the folder of ranks that meet on this machine, and for their port; returns what happened there."""
    path = Path(tempfile.gettempdir(), name)
    give_up = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < give_up
        time.sleep(0.001)
    outcomes = []
    for attempt in (
        lambda: list(path.iterdir()),
        (path / FILE_NAME).read_bytes,
        lambda: (path / FILE_NAME).write_bytes(b"mine"),
        lambda: path.rename(path.with_name("mine")),
        functools.partial(socket.socket().connect, ("127.0.0.1", port)),
    ):
        try:
            attempt()
            outcomes.append("done")
        except OSError as error:
            outcomes.append(type(error).__name__)
    return outcomes


@as_nobody
def replace_values(port, evil):
    """Replace the value that rank one has left."""
    store = connected(port)
    store.wait(["rank 1"])
    store.set("rank 1", bytes.fromhex(evil))
    return {}


@as_nobody
def record(port):
    """Copy what rank zero says to whoever asks."""
    store = connected(port)
    store.wait(["hpctrain/zero"])
    return {"zero": store.get("hpctrain/zero").hex()}


@as_nobody
def serve_recorded(port, zero, seconds):
    """Play rank zero of an earlier attempt; returns how often a rank introduced itself."""
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    store.set("hpctrain/zero", bytes.fromhex(zero))
    end = time.monotonic() + seconds
    while time.monotonic() < end and not store.check(["hpctrain/rank/1"]):
        time.sleep(0.02)
    seen = store.check(["hpctrain/rank/1"])
    store.set("hpctrain/rank/1/welcome", bytes.fromhex(zero)[:32])
    time.sleep(1)
    return {"seen": seen}
