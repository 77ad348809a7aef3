"""The cost of a save, against the raw work that no save can avoid; all in one run, in turns.

    python tests/benchmarks/checkpoint.py [--millions 100] [--rounds 3] [--folder DIR]

First the time for which training waits, against the plain copy of the same bytes into buffers that are kept;
then the whole save, durable on disk, against the raw write and fsync of the same bytes; then what checksums take of
it. Needs about 60 bytes of memory and 25 of disk per parameter. Times are medians over rounds, with the span in
brackets; ratios are medians of each round's ratio to the first line of its group.
"""

from __future__ import annotations

import os
import tempfile
from concurrent.futures import Future
from pathlib import Path
from unittest import mock

import torch
from async_save import AsyncSave
from state import State, measure, options

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
        self.other = AsyncSave(state)
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
        self.upload = self.other.begin()

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
        self.other.clear()
        self.state.clear()


class Save:
    """The cases that write, of a snapshot that is there."""

    def __init__(self, state: State, snapshot: Snapshot, kept: list[torch.Tensor]) -> None:
        self.state, self.snapshot, self.kept = state, snapshot, kept

    def raw(self) -> None:
        self.state.write_raw(self.kept)

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


def main() -> None:
    chosen = options(__doc__, rounds=3)
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
        del stall.other
        save = Save(state, state.between_steps.capture(), stall.kept)
        print("whole save, to durable on disk")
        measure(
            chosen.rounds,
            state.clear,
            [
                ("raw write and fsync", save.raw),
                ("raw write past the page cache, 4 MiB at a time", state.write_past_the_page_cache),
                ("hpctrain", save.ours),
                ("hpctrain without direct I/O", save.without_direct_io),
                ("torch.save and fsync", save.torch_save),
            ],
        )
        print("of that, checksums and digest")
        measure(
            chosen.rounds,
            state.clear,
            [("hpctrain without checksums and digest", save.without_checksums), ("hpctrain", save.ours)],
        )
        state.clear()
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
