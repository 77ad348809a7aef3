from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing.synchronize import Event
from pathlib import Path

from hpctrain.data.workers import quiet_worker


def be_stuck(ready: Event) -> None:
    quiet_worker(0)
    ready.set()
    time.sleep(60)


def test_a_stuck_worker_obeys_its_own_rank_and_nobody_else() -> None:
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    worker = context.Process(target=be_stuck, args=(ready,))
    worker.start()
    assert ready.wait(20)
    for name in ("INT", "USR1", "USR2", "TERM"):
        subprocess.run(["kill", f"-{name}", str(worker.pid)], check=True)
    worker.join(0.3)
    assert worker.is_alive()
    assert worker.pid is not None
    os.kill(worker.pid, 15)
    worker.join(20)
    assert worker.exitcode == 0


def lose_the_rank_at_once(place: Path) -> None:
    rank = os.getppid()
    (place / "new").write_text(str(os.getpid()))
    (place / "new").rename(place / "worker")
    while os.getppid() == rank:
        time.sleep(0.001)
    quiet_worker(0)
    (place / "lives on").touch()
    time.sleep(60)


def be_killed(place: Path) -> None:
    multiprocessing.get_context("fork").Process(target=lose_the_rank_at_once, args=(place,)).start()
    while not (place / "worker").exists():
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_whose_rank_died_before_it_began_is_no_orphan(tmp_path: Path) -> None:
    """PyTorch's own watch would take whoever inherited the worker for its rank."""
    rank = multiprocessing.get_context("fork").Process(target=be_killed, args=(tmp_path,))
    rank.start()
    rank.join(20)
    worker = int((tmp_path / "worker").read_text())
    give_up = time.monotonic() + 20
    while running(worker):
        assert not (tmp_path / "lives on").exists()
        assert time.monotonic() < give_up
        time.sleep(0.01)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


DIE_WITH_LOCKS = """
import gc, os, signal, sys
from multiprocessing.synchronize import SemLock
import numpy
import torch
from hpctrain.data.fetch import BatchFetcher
from hpctrain.data.workers import fetch_in_workers

class Deadly(torch.utils.data.Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        if index == 10:
            for lock in [found for found in gc.get_objects() if isinstance(found, SemLock)]:
                lock.acquire(False)
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor(index)

fetcher = BatchFetcher(Deadly(), 0, None)
batches = fetch_in_workers(
    fetcher, [(0, numpy.array([index])) for index in range(100)], num_workers=1, prefetch_factor=2, pin_memory=False
)
try:
    for batch in batches:
        pass
except RuntimeError as error:
    print(str(error).partition("(")[0], flush=True)
del batches
print("went on")
"""


def test_a_worker_that_dies_with_all_its_locks_does_not_hold_its_rank() -> None:
    done = subprocess.run(
        [sys.executable, "-c", DIE_WITH_LOCKS], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "DataLoader worker \nwent on\n", done.stderr
