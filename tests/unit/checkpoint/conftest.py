from __future__ import annotations

import re
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from hpctrain.checkpoint import page_locked
from hpctrain.checkpoint.page_locked import PageLockedMemory
from hpctrain.checkpoint.rng import rng_state
from hpctrain.checkpoint.state import Head, LiveState
from hpctrain.checkpoint.write import CheckpointWriter
from hpctrain.run.ledger import Claim, Ledger


class Driver:
    """Locks ordinary memory, one allocation for each `allow`, and takes two seconds of its own clock for each."""

    def __init__(self):
        self.now = 0.0
        self.sizes = []
        self.blocks = []
        self.threads = set()
        self._allowed = threading.Semaphore(0)

    def __call__(self, count):
        assert self._allowed.acquire(timeout=20)
        self.now += 2
        self.sizes.append(count)
        self.threads.add(threading.current_thread())
        memory = np.empty(count, np.uint8)
        self.blocks.append(weakref.ref(memory))
        return torch.from_numpy(memory)

    def clock(self):
        return self.now

    def allow(self, num_allocations):
        self._allowed.release(num_allocations)

    def memory(self):
        return PageLockedMemory(self, device_type="cpu", clock=self.clock)


@pytest.fixture
def driver():
    return Driver()


@pytest.fixture
def small_blocks(monkeypatch):
    """A block has room for one small tensor only: its size."""
    for name in ("LARGEST_BLOCK_BYTES", "SMALLEST_BLOCK_BYTES"):
        monkeypatch.setattr(page_locked, name, page_locked.ALIGNMENT)
    return page_locked.ALIGNMENT


@pytest.fixture
def trained():
    """Build a small model and its optimizer after a few steps, by a seed."""

    def build(seed=0, steps=2, kind=torch.optim.AdamW, **options):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
        optimizer = kind(model.parameters(), **options)
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(8, 6)).square().mean().backward()
            optimizer.step()
        return model, optimizer

    return build


@pytest.fixture
def snapshot(trained):
    """Take a snapshot of a step."""

    def take(step, seed=None, **extra):
        model, optimizer = trained(seed=step if seed is None else seed)
        return LiveState(
            model,
            {"": optimizer},
            extra=extra,
            head=Head(step=step, samples_seen=8 * step, world_size=1, config_digest="c0"),
            rng=[rng_state()],
        ).capture()

    return take


@pytest.fixture
def own_kib():
    """Return the KiB that this process has for itself alone; the kernel maps and unmaps pages of files as it likes."""
    return lambda: int(re.search(r"^RssAnon:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)[1])


@pytest.fixture
def claim(directory):
    """The claim of the attempt that owns the run."""
    ledger = Ledger(directory)
    return Claim(ledger, ledger.claim())


@pytest.fixture
def writer(directory, claim):
    """A writer of the attempt that owns the run."""
    return CheckpointWriter(directory, claim)
