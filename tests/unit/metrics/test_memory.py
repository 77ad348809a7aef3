from __future__ import annotations

import mmap
import os

import torch

from hpctrain.metrics.memory import Memory

SIZE = 64 * 2**20


def test_memory_in_use_rises_and_falls_and_its_peak_stays():
    memory = Memory(torch.device("cpu"))
    before = memory.used()
    # not a tensor: the allocator may give it memory that an earlier test has freed, and that is in use already
    with mmap.mmap(-1, SIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as taken:
        taken.write(bytes(SIZE))
        during = memory.used()
        peak = memory.peak()
    assert during - before > 0.9 * SIZE
    assert peak > 0.98 * during  # the kernel counts in batches
    assert memory.used() < during - 0.9 * SIZE
    assert memory.peak() > 0.98 * peak


def test_mapped_files_are_not_counted(tmp_path):
    path = tmp_path / "tokens"
    path.write_bytes(bytes(SIZE))
    memory = Memory(torch.device("cpu"))
    before = memory.used()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[at] for at in range(0, SIZE, 4096)) == 0
        assert memory.used() - before < SIZE / 4


def test_it_is_this_process_whatever_its_number(monkeypatch, tmp_path):
    """A container may see another process of that number in /proc, or no /proc."""
    monkeypatch.setattr(os, "getpid", lambda: 2**31 - 1)
    memory = Memory(torch.device("cpu"))
    assert memory.used() > SIZE / 4
    for name in ("_STATM", "_STATUS"):
        monkeypatch.setattr(f"hpctrain.metrics.memory.{name}", tmp_path / name)
    assert (memory.used(), memory.peak()) == (0, 0)
