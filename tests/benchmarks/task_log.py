"""What it costs a loop that its task logs three scalars: returned by `loss`, logged by `self.log.scalar`, or both.

    python tests/benchmarks/task_log.py [--rounds 48] [--steps 40] [--width 8000] [--log-every 10]

One process on one CPU thread, the real loop with its step, data, meter and sinks, without evaluation and saving. The
loops take turns, in an order that turns as well. `plain, again` is how far a loop is from itself: this machine's noise.
First the calls and the longer record are measured by themselves, in CPU time: that is the figure to go by on a machine
that does other things as well, whose noise hides a hundredth of a step.

The scalars are tensors that the step computes anyway, so the cost is that of logging them. With the default width a
step takes about 5 ms; `--width 64 --steps 500` has steps of a fraction of a millisecond, in which the cost in
microseconds shows best. CPU and wall time per step, medians over rounds with the quartiles in brackets; a
cost is the median of each round's difference to `plain`.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from measuring import FOREVER, Side, shown
from torch import nn
from torch.nn.functional import cross_entropy

from hpctrain.config.compose import Composer
from hpctrain.data.fetch import TensorBatches
from hpctrain.rank.compiler import spare_compiler
from hpctrain.tasks.contract import split_loss
from hpctrain.tasks.task import Task

KINDS = {"plain": "plain", "plain, again": "plain", "mapping": "mapping", "log.scalar": "scalar", "both": "both"}


class Work(Task):
    def __init__(self, kind="plain", width=64):
        self.kind, self.width = kind, width

    def build_model(self):
        return nn.Sequential(nn.Linear(64, self.width), nn.ReLU(), nn.Linear(self.width, 10))

    def train_dataset(self):
        return TensorBatches(torch.randn(3200, 64), torch.randint(0, 10, (3200,)))

    def loss(self, model, batch):
        features, labels = batch
        loss = cross_entropy(model(features), labels)
        if self.kind in ("scalar", "both"):
            self.log.scalar("one", loss)
            self.log.scalar("two", loss)
            self.log.scalar("three", loss)
        if self.kind in ("mapping", "both"):
            return {"loss": loss, "a": loss, "b": loss, "c": loss}
        return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=48)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--width", type=int, default=8000)
    parser.add_argument("--log-every", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    spare_compiler()
    words = ["task=custom", "task._target_=__main__.Work", f"+task.width={options.width}"]
    words += ["trainer.global_batch_size=32", "trainer.max_epochs=1000000", f"logger.every_steps={options.log_every}"]
    composer = Composer()
    with tempfile.TemporaryDirectory() as folder:
        sides = {
            name: Side(composer.compose([*words, f"+task.kind={kind}"]), Path(folder) / str(number))
            for number, (name, kind) in enumerate(KINDS.items())
        }
        for side in sides.values():
            run(side, options.steps)
        one_at_a_time(sides["plain"], sides["both"], options.log_every)
        if options.rounds < 2:
            return
        turns = itertools.islice(itertools.cycle(itertools.permutations(sides)), options.rounds)
        rounds = [{name: run(sides[name], options.steps) for name in order} for order in turns]
    print(f"{options.rounds} rounds of {options.steps} steps, a record every {options.log_every} steps, us per step")
    for name in sides:
        for kind, unit in ((1, "CPU "), (0, "wall")):
            us = [one[name][kind] for one in rounds]
            over = [one[name][kind] - one["plain"][kind] for one in rounds]
            ratio = statistics.median(one[name][kind] / one["plain"][kind] for one in rounds)
            print(f"{name:<14}{unit} {shown(us):>30} over {shown(over):>24} us, {(ratio - 1) * 100:6.2f} %", flush=True)


def one_at_a_time(plain: Side, both: Side, log_every: int) -> None:
    """What three scalars cost per step, without what surrounds them."""
    log, meter, loss = both.training.task_log, both.training.meter, torch.tensor(1.0)
    checked: set[str] = set()

    def scalars() -> None:
        log.scalar("one", loss)
        log.scalar("two", loss)
        log.scalar("three", loss)
        log.add_to_meter(meter, 32, ())

    def mapping() -> None:
        _, others = split_loss("Work.loss", {"loss": loss, "a": loss, "b": loss, "c": loss}, checked)
        for name, value in others.items():
            meter.add_value(f"train/{name}", value, 32)

    def record(side: Side) -> None:
        values = side.training.meter.means()
        for sink in side.sinks:
            sink.log(FOREVER, values)

    with log.training():
        per_step_us = {"three log.scalar": each_us(scalars), "a mapping of three": each_us(mapping)}
    longer_us = each_us(lambda: record(both)) - each_us(lambda: record(plain))
    per_step_us["six more values in a record"] = longer_us / log_every
    print("one at a time, us of CPU time per step: medians of 200 rounds of 100 calls")
    for name, us in per_step_us.items():
        print(f"{name:<30}{us:8.2f}: {us / 50:.3f} % of 5 ms")


def each_us(action: Callable[[], None]) -> float:
    """Median CPU time of a call, in microseconds."""
    found = []
    for _ in range(200):
        begin = time.process_time_ns()
        for _ in range(100):
            action()
        found.append((time.process_time_ns() - begin) / 1e5)
    return statistics.median(found)


def run(side: Side, steps: int) -> tuple[float, float]:
    """Microseconds of wall time and of CPU time per step."""
    with side.training.task_log.training():
        return side.run(steps)


if __name__ == "__main__":
    main()
