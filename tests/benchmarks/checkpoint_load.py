"""The cost of loading a checkpoint, against torch.load, mapped and plain; each load in a process of its own, in turns.

    python tests/benchmarks/checkpoint_load.py [--millions 100] [--rounds 5] [--folder DIR] [--untouched]

hpctrain compares checksums first, and its optimizer owns its memory afterwards. torch.load(mmap=True) does neither:
its optimizer is still mapped from the file, and copied page by page in the first step. So each line also has the time
to the end of that step. Needs about 50 bytes of memory and 13 of disk per parameter.

The host of a virtual machine may take back what its kernel has free, and be slower to give it again than all that is
measured here. So each process uses as much memory as it will need, and frees it, just before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from state import State, options, ratio, span

from hpctrain.checkpoint.host_memory import huge_pages
from hpctrain.checkpoint.read import load
from hpctrain.checkpoint.restore import restore_weights
from hpctrain.run.checkpoints import find_damage

CASES = {
    "mapped": "torch.load mapped, load_state_dict",
    "mapped_and_verified": "the same, checksums compared before",
    "ours": "hpctrain",
    "ours_verified_elsewhere": "hpctrain, verified by another rank",
    "plain": "torch.load plain, load_state_dict",
}

MEMORY_BYTES = 20
"""That loading and a step take, per parameter."""


class Load:
    """The cases; each ends with the model and a new optimizer as they were saved."""

    def __init__(self, state: State) -> None:
        self.state = state

    def fresh(self) -> None:
        self.state.optimizer = torch.optim.AdamW(self.state.model.parameters())

    def with_torch(self, mmap: bool) -> None:
        parts = [
            torch.load(self.state.checkpoint / name, mmap=mmap, weights_only=True)
            for name in ("model.pt", "optimizer.pt")
        ]
        self.state.model.load_state_dict(parts[0])
        self.state.optimizer.load_state_dict(parts[1])

    def mapped(self) -> None:
        self.with_torch(mmap=True)

    def mapped_and_verified(self) -> None:
        assert not find_damage(self.state.checkpoint)
        self.with_torch(mmap=True)

    def plain(self) -> None:
        self.with_torch(mmap=False)

    def ours(self) -> None:
        restore_weights(load(self.state.checkpoint).states, self.state.model, {"": self.state.optimizer})

    def ours_verified_elsewhere(self) -> None:
        restore_weights(load(self.state.checkpoint, verified=True).states, self.state.model, {"": self.state.optimizer})

    def warm(self) -> None:
        self.fresh()
        for file in self.state.checkpoint.iterdir():
            file.read_bytes()

    def cold(self) -> None:
        self.fresh()
        for file in self.state.checkpoint.iterdir():
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def touch(count: int) -> None:
    """Have the kernel hold this many free bytes, so that it needn't ask the host for them."""
    torch.frombuffer(huge_pages(count), dtype=torch.uint8).fill_(1)


def measure_case(case: str, before: str, millions: int, folder: Path, *, untouched: bool) -> None:
    """Print the seconds until all is restored, and until the next step's end."""
    state = State(millions, folder)
    load_it = Load(state)
    getattr(load_it, before)()
    if not untouched:
        touch(int(millions * 1e6) * MEMORY_BYTES)
    begin = time.perf_counter()
    getattr(load_it, case)()
    restored = time.perf_counter()
    state.optimizer_step()
    print(json.dumps([restored - begin, time.perf_counter() - begin]))


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] in CASES:
        case, before, millions, folder, untouched = sys.argv[1:]
        measure_case(case, before, int(millions), Path(folder), untouched=untouched == "True")
        return
    chosen = options(__doc__, rounds=5, untouched="leave the memory to the host")
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        state = State(chosen.millions, Path(folder))
        state.writer.write(state.between_steps.capture())
        size, names = state.bytes, list(CASES)
        del state
        for before, where in (("warm", "in the page cache"), ("cold", "not in the page cache")):
            print(f"load and restore {size / 1e9:.2f} GB, {where}")
            restored: dict[str, list[float]] = {name: [] for name in names}
            stepped: dict[str, list[float]] = {name: [] for name in names}
            for turn in range(chosen.rounds):
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    words = [name, before, str(chosen.millions), folder, str(chosen.untouched)]
                    command = [sys.executable, __file__, *words]
                    seconds = json.loads(subprocess.check_output(command))
                    restored[name].append(seconds[0])
                    stepped[name].append(seconds[1])
            for name, text in CASES.items():
                first = f"{span(restored[name])}  x {ratio(restored[name], restored['mapped']):.2f}"
                then = f"{span(stepped[name])}  x {ratio(stepped[name], stepped['mapped']):.2f}"
                print(f"  {text:38s}{first}  to the end of the next step {then}", flush=True)


if __name__ == "__main__":
    main()
