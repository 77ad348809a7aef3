"""What the measuring costs a loop of tiny steps: the same loop with logger.measure=true and false, block by block.

    python tests/benchmarks/measuring.py [--rounds 49] [--steps 500] [--log-every 10] [--faster 20]

The worst case: the step of a small network on one CPU thread takes a fraction of a millisecond, and metrics go to a
file and to TensorBoard every ten steps. One process, the real loop with its step, data, meter and sinks, without
evaluation and saving.

First everything is measured by itself, in CPU time, and set against how often it happens: that is the figure to go by
on a machine that does other things as well. Then the loops take turns, in an order that turns as well. `off, again` is
how far a loop is from itself: this machine's noise, in which the cost may be lost. So the last one looks at steps and
at memory, logs what changes slowly and writes its verdict `--faster` times as often as in training; the last line has
its cost divided by that. Wall time and CPU time per step, medians over rounds with the quartiles in brackets; a cost is
the median of each round's ratio. `--rounds 0` leaves that part out.

What can't be switched off, two clock reads per step in the loader and a comparison in the loop, is in all of them.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.config.compose import Composer
from hpctrain.config.root import Config
from hpctrain.data.fetch import TensorBatches
from hpctrain.metrics.sink import JsonLinesSink
from hpctrain.metrics.tensorboard import TensorBoardSink
from hpctrain.parallel.mesh import TrainingWorld
from hpctrain.rank.compiler import spare_compiler
from hpctrain.rank.stop_request import StopRequest
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Claim, Ledger
from hpctrain.run.times import Times
from hpctrain.tasks.task import Task
from hpctrain.train.checkpointing import StartPoint
from hpctrain.train.divergence import Divergence
from hpctrain.train.loop import AttemptContext, Loop
from hpctrain.train.profiling import profiler, sampler
from hpctrain.train.profiling.profiler import Profiler
from hpctrain.train.stopping import Stopping
from hpctrain.train.training import build
from hpctrain.train.training_log import TrainingLog

FOREVER = 10**9
NOW_AND_THEN = (
    (sampler, "SAMPLE_EVERY_S"),
    (sampler, "MEMORY_EVERY_S"),
    (profiler, "LOG_EVERY_S"),
    (profiler, "WRITE_EVERY_S"),
)


class Tiny(Task):
    def build_model(self):
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def train_dataset(self):
        return TensorBatches(torch.randn(3200, 64), torch.randint(0, 10, (3200,)))

    def loss(self, model, batch):
        features, labels = batch
        return cross_entropy(model(features), labels)


@contextmanager
def hurry(faster: float):
    """Inside, everything that happens now and then happens so many times as often."""
    usual = {(module, name): getattr(module, name) for module, name in NOW_AND_THEN}
    for (module, name), seconds in usual.items():
        setattr(module, name, seconds / faster)
    try:
        yield
    finally:
        for (module, name), seconds in usual.items():
            setattr(module, name, seconds)


class NoCheckpoints:
    """Stands where the loop's checkpointing would be."""

    best_step = copied_step = None
    clock, due_at_s = time.monotonic, math.inf

    def is_at_end(self, step):
        return False

    def require_constant_buffers(self):
        pass

    def save(self, step, *, evaluation_due, wait):
        pass


class Side:
    """One loop, and as many of its steps as are asked for."""

    def __init__(self, config: Config, folder: Path, faster: float = 1.0) -> None:
        self.faster = faster
        self.config, self.world = config, TrainingWorld(rank=0, size=1, local_rank=0, devices=(torch.device("cpu"),))
        self.training = build(config, self.world, only_trains=True)
        self.times = Times(0.0)
        self.step = 0
        directory = RunDirectory.at(folder)
        directory.create(0o750)
        self.times.record_in(folder)
        self.times.enter("train_s")
        self.sinks = [JsonLinesSink(folder / "metrics.jsonl", 0), TensorBoardSink(folder / "tensorboard", 0)]
        stopping = Stopping(self.world, ClusterEnvironment.from_environment({}), StopRequest())
        ledger = Ledger(directory)
        claim = Claim(ledger, ledger.claim())
        self.attempt = AttemptContext(claim=claim, stopping=stopping, times=self.times, hosts=None)
        loader = self.training.data.loader(0)
        self.batches = iter(loader)
        self.profiler = Profiler(self.training, loader, stopping.agreement, self.times, start_step=0)

    def run(self, steps: int) -> tuple[float, float]:
        """Microseconds of wall time and of CPU time per step."""
        start = StartPoint(self.step)
        self.config.trainer.max_steps = self.step + steps
        log = TrainingLog(self.training, start, self.profiler, self.times)
        log._sinks = self.sinks
        checkpointing = NoCheckpoints()
        loop = Loop(
            self.training,
            self.attempt,
            start,
            profiler=self.profiler,
            log=log,
            checkpointing=checkpointing,
            divergence=Divergence(self.training, None, checkpointing, self.step),
        )
        wall, cpu = time.perf_counter(), time.process_time()
        with hurry(self.faster):
            loop.run(self.batches)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        self.step += steps
        return wall / steps * 1e6, cpu / steps * 1e6


def one_at_a_time(side: Side, log_every: int) -> None:
    """What each thing costs, and what share of the time that is at the pace of a training."""
    look, step, batches = side.profiler._sampler, side.training.step, side.batches
    assert look is not None
    plain_us, timed_us = alternately(lambda: step(FOREVER, batches), lambda: look.do_step(FOREVER, batches), times=3000)
    record = side.profiler.metrics(FOREVER, 1e5)

    def memory() -> None:
        look._memory_at = float("-inf")
        look.read_memory(FOREVER)

    def values() -> None:
        side.profiler._logged_at, side.profiler._written_at = float("-inf"), float("inf")
        for sink in side.sinks:
            sink.log(FOREVER, side.profiler.metrics(FOREVER, 1e5) or record)

    def window() -> None:
        side.profiler._records, side.profiler._logged_at = 2, float("inf")
        side.profiler.metrics(FOREVER, 1e5)

    each_s = {
        "a look at a step": (timed_us - plain_us, sampler.SAMPLE_EVERY_S),
        "a look at memory": (alternately(memory)[0], sampler.MEMORY_EVERY_S),
        "a record of slow values": (alternately(values)[0], profiler.LOG_EVERY_S),
        "a verdict written": (alternately(lambda: side.profiler._write(FOREVER))[0], profiler.WRITE_EVERY_S),
        "any record": (alternately(window)[0], log_every * plain_us / 1e6),
    }
    print(f"one at a time, us of CPU time (a step takes {plain_us:.1f})")
    for name, (cost_us, every_s) in each_s.items():
        print(f"{name:<24}{cost_us:>8.2f}, every {every_s * 1e3:>8.2f} ms: {cost_us / every_s / 1e4:.4f} %")
    print(f"{'together':<24}{sum(cost_us / every_s for cost_us, every_s in each_s.values()) / 1e4:>30.4f} %\n")


def alternately(*actions: Callable[[], object], times: int = 400) -> list[float]:
    """Median CPU time of each, in microseconds."""
    found: list[list[int]] = [[] for _ in actions]
    for _ in range(times):
        for action, readings in zip(actions, found, strict=True):
            begin = time.process_time_ns()
            action()
            readings.append(time.process_time_ns() - begin)
    return [statistics.median(readings) / 1e3 for readings in found]


def shown(values: list[float], digits: int = 1) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.{digits}f} [{low:.{digits}f} .. {high:.{digits}f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=49)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--faster", type=float, default=20.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    spare_compiler()
    words = ["task=custom", "task._target_=__main__.Tiny", "trainer.global_batch_size=32", "trainer.max_epochs=1000000"]
    words.append(f"logger.every_steps={options.log_every}")
    composer, often = Composer(), f"on, {options.faster:g} x as often"
    kinds = {"off": ("false", 1.0), "off, again": ("false", 1.0), "on": ("true", 1.0), often: ("true", options.faster)}
    with tempfile.TemporaryDirectory() as folder:
        sides = {
            name: Side(composer.compose([*words, f"logger.measure={measure}"]), Path(folder) / str(number), faster)
            for number, (name, (measure, faster)) in enumerate(kinds.items())
        }
        for side in sides.values():
            side.run(options.steps)
        one_at_a_time(sides["on"], options.log_every)
        if options.rounds < 2:
            return
        turns = itertools.islice(itertools.cycle(itertools.permutations(sides)), options.rounds)
        rounds = [{name: sides[name].run(options.steps) for name in order} for order in turns]
    print(f"{options.rounds} rounds of {options.steps} steps, a record every {options.log_every} steps, us per step")
    over = {
        name: [[(one[name][kind] / one["off"][kind] - 1) * 100 for one in rounds] for kind in (0, 1)] for name in sides
    }
    for name in sides:
        wall, cpu = ([one[name][kind] for one in rounds] for kind in (0, 1))
        print(f"{name:<20}wall {shown(wall):>24} over {shown(over[name][0], 2):>24} %", end="")
        print(f"   CPU {shown(cpu):>24} over {shown(over[name][1], 2):>24} %")
    costs = [statistics.median(over[often][kind]) / options.faster for kind in (0, 1)]
    print(f"of that, per {options.faster:g}: wall {costs[0]:.3f} %, CPU {costs[1]:.3f} %")


if __name__ == "__main__":
    main()
