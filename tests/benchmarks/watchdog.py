"""What the watchdog costs a loop of tiny steps: the same loop with it and without it, block by block.

    python tests/benchmarks/watchdog.py [--rounds 31] [--seconds 1] [--faster 100]

The worst case: a step of a small network on one CPU thread takes a fraction of a millisecond, and the watchdog's thread
wants Python's lock once a second. That is too little to be seen on a machine that does anything else, so the watchdog
looks `--faster` times as often as it does in training, and the cost is divided by that. Wall time, and the CPU time of
the whole process with the watchdog's threads in it. Medians over rounds, with the span in brackets; a cost is the
median of each round's ratio.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

from hpctrain.config.health import Health
from hpctrain.rank import watchdog
from hpctrain.rank.stop_request import StopRequest


class Loop:
    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.batch, self.labels = torch.randn(32, 32), torch.randint(0, 10, (32,))
        self.step = 0

    def run(self, seconds: float) -> tuple[float, float]:
        """Microseconds of wall time and of CPU time per step."""
        begin, cpu, first = time.perf_counter(), time.process_time(), self.step
        while time.perf_counter() - begin < seconds:
            for _ in range(100):
                self.optimizer.zero_grad()
                nn.functional.cross_entropy(self.model(self.batch), self.labels).backward()
                self.optimizer.step()
                self.step += 1
        wall, cpu = time.perf_counter() - begin, time.process_time() - cpu
        steps = self.step - first
        return wall / steps * 1e6, cpu / steps * 1e6


def cpu_s(name: str) -> float:
    """CPU time of the thread with this name."""
    thread = next(thread for thread in threading.enumerate() if thread.name == name)
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def shown(values: list[float], unit: str) -> str:
    return f"{statistics.median(values):8.3f} {unit} [{min(values):.3f} .. {max(values):.3f}]"


class Watched:
    """The loop, as the watchdog reads it."""

    times = SimpleNamespace(doing="train_s")
    description = "the loop"
    stop = StopRequest()
    program = None
    communication_error = ""
    record_hang = print

    def __init__(self, loop: Loop, folder: Path) -> None:
        self.loop = loop
        self.stacks = folder / "stacks"
        claim = SimpleNamespace(is_cancelled=False)
        self.member = SimpleNamespace(claim=claim, stacks_request=folder / "request")

    @property
    def progress(self) -> int:
        return self.loop.step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--faster", type=float, default=100.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    watchdog.REQUESTS_EVERY_S /= options.faster
    loop, folder = Loop(), Path(tempfile.mkdtemp())
    loop.run(2.0)
    without, with_it, used = [], [], []
    for number in range(options.rounds):
        for watched in (True, False) if number % 2 else (False, True):
            dog = watchdog.Watchdog(Health(), Watched(loop, folder), tick_s=1 / options.faster)
            with dog if watched else nullcontext():
                (with_it if watched else without).append(loop.run(options.seconds))
                if watched:
                    used.append(cpu_s("hpctrain-watchdog") / options.seconds * 100)
    print(f"{options.rounds} rounds of {options.seconds:g} s, looking {options.faster:g} times as often")
    for index, kind in enumerate(("wall", "CPU")):
        bare, watched_us = [one[index] for one in without], [one[index] for one in with_it]
        ratios = [(one / other - 1) * 100 for one, other in zip(watched_us, bare, strict=True)]
        print(f"{kind:4} per step, without   {shown(bare, 'us')}")
        print(f"{kind:4} per step, with      {shown(watched_us, 'us')}")
        print(f"{kind:4} cost                {shown(ratios, '%')}")
        print(f"{kind:4} cost in training    {statistics.median(ratios) / options.faster:8.4f} %")
    print(f"its thread's CPU         {shown(used, '%')}")


if __name__ == "__main__":
    main()
