"""What a program pays for `hpctrain.session`: microseconds per call, in one process and on gloo ranks.

    python tests/benchmarks/session.py [--calls 100000] [--ranks 2] [--step-ms 5]

In one process, a thread reads the pipe as hpctrain's process would. Shown are medians of nine rounds, with the span in
brackets. On ranks, two loops of sleeps take turns, with and without `should_stop`: shown is what a call adds to a step,
and how much CPU time it takes.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from as_ranks import run_as_ranks

from hpctrain import session

ROUNDS = 9


def timed(call: Callable[[int], object], calls: int) -> list[float]:
    found = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for number in range(calls):
            call(number)
        found.append((time.perf_counter() - begin) / calls * 1e6)
    return found


def shown(name: str, values: list[float], unit: str = "us") -> None:
    print(f"{name:42} {statistics.median(values):9.2f} {unit} [{min(values):.2f} .. {max(values):.2f}]")


def drain(pipe: int) -> None:
    while os.read(pipe, 1 << 20):
        pass


def in_one_process(calls: int) -> None:
    shown("step(n), without hpctrain", timed(session.step, calls))
    shown("should_stop(), without hpctrain", timed(lambda _: session.should_stop(), calls))
    with tempfile.TemporaryDirectory() as folder:
        os.mkfifo(Path(folder) / "events")
        pipe = os.open(Path(folder) / "events", os.O_RDWR)
        threading.Thread(target=drain, args=(pipe,), daemon=True).start()
        os.environ["HPCTRAIN_SESSION"] = folder
        reporting = importlib.reload(session)
        reporting.start()
        shown("step(n)", timed(reporting.step, calls))
        metrics = {"train/loss": 0.5, "train/lr": 1e-3}
        shown("step(n, metrics) of two numbers", timed(lambda n: reporting.step(n, metrics), calls // 10))
        shown("should_stop(), without torch.distributed", timed(lambda _: reporting.should_stop(), calls))
        assert not reporting.should_stop()


def be_rank(steps: int, step_s: float) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    wall = dict[bool, list[float]]({True: [], False: []})
    used = dict[bool, list[float]]({True: [], False: []})
    for number in range(2 * ROUNDS + 2):
        asks = bool(number % 2)
        dist.barrier()
        begin, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            time.sleep(step_s)
            if asks:
                session.should_stop()
        wall[asks].append((time.perf_counter() - begin) / steps * 1e6)
        used[asks].append((time.process_time() - cpu) / steps * 1e6)
    if dist.get_rank() == 0:
        for name, found in (("wall", wall), ("CPU", used)):
            pairs = list(zip(found[True], found[False], strict=True))[1:]
            shown(f"should_stop() on {dist.get_world_size()} ranks, {name} time added", [a - b for a, b in pairs])
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    if "RANK" in os.environ:
        be_rank(options.steps, options.step_ms / 1000)
        return
    in_one_process(options.calls)
    del os.environ["HPCTRAIN_SESSION"]
    run_as_ranks(options.ranks)


if __name__ == "__main__":
    main()
