"""The cost of a save, against the raw work that no save can avoid; all in one run, in turns.

    python tests/benchmarks/checkpoint.py [--millions 100] [--rounds 3] [--folder DIR]

First the time for which training waits, against the plain copy of the same bytes into buffers that are kept;
then the whole save, durable on disk, against the raw write and fsync of the same bytes; then what checksums take of
it. Needs about 60 bytes of memory and 25 of disk per parameter. Times are medians over rounds, with the span in
brackets; ratios are medians of each round's ratio to the first line of its group.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import warnings
from concurrent.futures import Future
from pathlib import Path
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from state import State, measure, options
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from hpctrain.checkpoint import write
from hpctrain.checkpoint.state import Snapshot, weights_digest
from hpctrain.run.checkpoints import find_damage


class Null:
    """A checksum that takes no time."""

    def __init__(self, data: object = b"") -> None: ...
    def update(self, data: object) -> None: ...

    def hexdigest(self) -> str:
        return ""


class Stall:
    """The cases in which training waits; each returns when it may continue."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.kept = [tensor.detach().clone() for tensor in state.live]
        self.saver = state.saver()
        self.stager = DefaultStager(
            StagingOptions(False, False, False, False)
        )  # no pinned or shared memory: it keeps its buffers
        self.upload: Future[object] | None = None

    def copy(self) -> None:
        for kept, tensor in zip(self.kept, self.state.live, strict=True):
            kept.copy_(tensor.detach())

    def save(self) -> None:
        self.saver.save(self.state.between_steps, wait=False)

    def first_save(self) -> None:
        self.saver = self.state.saver()
        self.save()

    def async_save(self) -> None:
        tree = {"model": self.state.model.state_dict(), "optimizer": self.state.optimizer.state_dict()}
        folder = self.state.raw.with_name("dcp")
        future = dcp.async_save(tree, checkpoint_id=folder, async_stager=self.stager, no_dist=True)
        assert isinstance(future, Future)
        self.upload = future

    def torch_save(self) -> None:
        with self.state.raw.open("wb") as file:
            torch.save({"model": self.state.model.state_dict(), "optimizer": self.state.optimizer.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())

    def settle(self) -> None:
        """Wait for what was begun, and take it away."""
        self.saver.finish()
        if self.upload is not None:
            self.upload.result()
            self.upload = None
        clear(self.state)


class Save:
    """The cases that write, of a snapshot that is there."""

    def __init__(self, state: State, snapshot: Snapshot, kept: list[torch.Tensor]) -> None:
        self.state, self.snapshot, self.kept = state, snapshot, kept

    def raw(self) -> None:
        self.state.write_raw(self.kept)

    def raw_direct(self) -> None:
        block = mmap.mmap(-1, 4 << 20)
        descriptor = os.open(self.state.raw, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
        for _ in range(self.state.bytes // len(block)):
            os.write(descriptor, block)
        os.fsync(descriptor)
        os.close(descriptor)

    def ours(self) -> None:
        self.state.writer.write(self.snapshot)

    def without_checksums(self) -> None:
        with mock.patch("xxhash.xxh3_128", Null), mock.patch.object(write, "weights_digest", str):
            self.ours()

    def without_direct_io(self) -> None:
        with mock.patch.object(os, "O_DIRECT", 0):
            self.ours()

    def torch_save(self) -> None:
        with self.state.raw.open("xb") as file:
            torch.save({"model": self.snapshot.model, "optimizer": self.snapshot.optimizer}, file)
            file.flush()
            os.fsync(file.fileno())


def clear(state: State) -> None:
    state.raw.unlink(missing_ok=True)
    for folder in (state.checkpoint, state.raw.with_name("dcp")):
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    chosen = options(__doc__, rounds=3)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        state = State(chosen.millions, Path(folder))
        stall = Stall(state)
        print(f"training waits, for a save of {state.bytes / 1e9:.2f} GB")
        measure(
            chosen.rounds,
            lambda: None,
            [
                ("raw copy into kept buffers", stall.copy),
                ("hpctrain", stall.save),
                ("hpctrain, the first save", stall.first_save),
                ("torch.distributed.checkpoint.async_save, kept", stall.async_save),
                ("torch.save and fsync", stall.torch_save),
            ],
            settle=stall.settle,
        )
        del stall.stager
        save = Save(state, state.between_steps.capture(), stall.kept)
        print("whole save, to durable on disk")
        measure(
            chosen.rounds,
            lambda: clear(state),
            [
                ("raw write and fsync", save.raw),
                ("raw write past the page cache, 4 MiB at a time", save.raw_direct),
                ("hpctrain", save.ours),
                ("hpctrain without direct I/O", save.without_direct_io),
                ("torch.save and fsync", save.torch_save),
            ],
        )
        print("of that, checksums and digest")
        measure(
            chosen.rounds,
            lambda: clear(state),
            [("hpctrain without checksums and digest", save.without_checksums), ("hpctrain", save.ours)],
        )
        clear(state)
        save.ours()
        measure(
            chosen.rounds,
            lambda: None,
            [
                ("verify alone", lambda: find_damage(state.checkpoint)),
                ("digest", lambda: weights_digest(save.snapshot.model)),
            ],
        )


if __name__ == "__main__":
    main()
