"""How much slower the steps are while a checkpoint is written in the background.

    python tests/benchmarks/checkpoint_background.py [--millions 100] [--rounds 3] [--folder DIR]

Each line: time per step while the write lasts, its ratio to steps without a write, and how long the write took.
The raw write shows what the disk itself takes: the same bytes past the page cache, by a thread of the same niceness as
hpctrain's. Needs about 60 bytes of memory and 13 of disk per parameter.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from async_save import AsyncSave
from state import State, options, ratio

from hpctrain.checkpoint.saver import WRITER_NICENESS

ALONE_S = 1.5
"""Seconds of steps without a write."""


class Writers:
    """Writers; each method starts one, and returns a function that returns whether it still writes."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.saver = state.saver()
        self.other = AsyncSave(state)

    def nothing(self) -> Callable[[], bool]:
        end = time.perf_counter() + ALONE_S
        return lambda: time.perf_counter() < end

    def raw(self) -> Callable[[], bool]:
        def write() -> None:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), WRITER_NICENESS)
            self.state.write_past_the_page_cache()

        thread = threading.Thread(target=write)
        thread.start()
        return thread.is_alive

    def ours(self) -> Callable[[], bool]:
        self.saver.save(self.state.between_steps, wait=False, retain=False)
        return lambda: self.saver.busy

    def async_save(self) -> Callable[[], bool]:
        future = self.other.begin()
        return lambda: not future.done()

    def clear(self) -> None:
        self.saver.finish()
        self.other.clear()
        self.state.clear()


def main() -> None:
    chosen = options(__doc__, rounds=3)
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        state = State(chosen.millions, Path(folder))
        writers = Writers(state)
        cases = {
            "nothing": writers.nothing,
            "raw write and fsync": writers.raw,
            "hpctrain": writers.ours,
            "torch.distributed.checkpoint.async_save": writers.async_save,
        }
        per_step: dict[str, list[float]] = {name: [] for name in cases}
        lasted: dict[str, list[float]] = {name: [] for name in cases}
        for number in range(chosen.rounds + 1):
            for name, begin in cases.items():
                writing, steps = begin(), 0
                start = time.perf_counter()
                while writing() or not steps:
                    state.step()
                    steps += 1
                seconds = time.perf_counter() - start
                writers.clear()
                if number:  # the first round warms up
                    per_step[name].append(seconds / steps)
                    lasted[name].append(seconds)
        print(f"steps during a write of {state.bytes / 1e9:.2f} GB")
        for name, times in per_step.items():
            slower = ratio(times, per_step["nothing"])
            took = statistics.median(lasted[name])
            print(f"  {name:42s}{statistics.median(times):.3f} s per step  x {slower:.3f}  for {took:.2f} s")


if __name__ == "__main__":
    main()
