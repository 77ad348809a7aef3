"""What agreeing costs a loop of tiny steps: the same loop with it and without it, block by block, on gloo ranks.

    python tests/benchmarks/agreement.py [--ranks 2] [--rounds 21] [--seconds 2] [--interval 1]

A step is a forward and backward pass with DDP, so that the ranks go through it together as in training, plus the
agreement of `hpctrain.rank.agreement` in half of the blocks. No rank asks for anything: that is what every step
of every run pays. Blocks with and without it take turns, in changing order, and have the same number of steps. Shown
are medians over rounds, with the span in brackets, of rank zero's wall time per step and of all its threads' CPU time;
a cost is the median of each round's ratio. In training the ranks agree as often as half a percent of the time allows,
and once a second at least; `--interval` gives a shorter bound in seconds, so that a cost shows above the noise.

Two more figures need no loop: what one agreement takes when it is begun and waited for at once, with nothing to do
meanwhile, which is more than training pays for it; and the call after a step at which nothing is due.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch
from as_ranks import run_as_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.rank.agreement import MAX_INTERVAL_S, Agreement
from hpctrain.rank.rendezvous import meet
from hpctrain.rank.stop_request import StopRequest
from hpctrain.rank.world import World, join


class Loop:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.batch, self.labels = torch.randn(32, 32), torch.randint(0, 10, (32,))
        self.step = 0

    def run(self, steps: int, agreement: Agreement | None) -> tuple[float, float]:
        """Microseconds of wall time and of CPU time per step."""
        begin, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(self.batch), self.labels).backward()
            self.optimizer.step()
            self.step += 1
            if agreement is not None:
                agreement.decide(self.step, save=False)
        wall, used = time.perf_counter() - begin, time.process_time() - cpu
        return wall / steps * 1e6, used / steps * 1e6


def be_rank(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    environment = ClusterEnvironment.from_environment(os.environ)
    store = meet(environment, init_method="env://", secret=b"s", token=environment.token, timeout_s=60)
    world = join(environment, store, backend="gloo", devices=(torch.device("cpu"),), timeout_s=60)
    loop = Loop()
    loop.run(500, None)
    # the same number on all ranks, or they would wait for each other forever
    steps = int(world.broadcast(options.seconds * 1e6 / loop.run(500, None)[0])) + 1
    without, with_it = list[tuple[float, float]](), list[tuple[float, float]]()
    agreement = Agreement(world, StopRequest(), options.interval)
    agreement.agree_and_calibrate()
    loop.run(steps, agreement)
    for number in range(options.rounds):
        for agrees in (True, False) if number % 2 else (False, True):
            (with_it if agrees else without).append(loop.run(steps, agreement if agrees else None))
    alone = [agreements_us(world) for _ in range(9)]
    if world.is_rank_zero:
        report(options, world, steps, without, with_it)
        for index, kind in enumerate(("wall", "CPU")):
            one = [us[index] for us in alone]
            print(f"{kind:4} of one agreement    {shown(one, 'us')}")
        print(f"a step with nothing due  {shown(idle_us(), 'us')}")
    world.close()


def report(
    options: argparse.Namespace,
    world: World,
    steps: int,
    without: list[tuple[float, float]],
    with_it: list[tuple[float, float]],
) -> None:
    print(f"{world.size} ranks, {options.rounds} rounds of {steps} steps, intervals of {options.interval:g} s or less")
    for index, kind in enumerate(("wall", "CPU")):
        bare, agreeing = [one[index] for one in without], [one[index] for one in with_it]
        ratios = [(one / other - 1) * 100 for one, other in zip(agreeing, bare, strict=True)]
        print(f"{kind:4} per step, without   {shown(bare, 'us')}")
        print(f"{kind:4} per step, with      {shown(agreeing, 'us')}")
        print(f"{kind:4} cost                {shown(ratios, '%')}")


def agreements_us(world: World) -> tuple[float, float]:
    """Microseconds of wall time and of CPU time of one agreement that is waited for; collective."""
    agreement, count = Agreement(world, StopRequest(), 1e-9), 500
    for step in range(3):
        agreement.decide(step, save=False)
    begin, cpu = time.perf_counter(), time.process_time()
    for step in range(3, 3 + count):
        agreement.decide(step, save=False)
    return (time.perf_counter() - begin) / count * 1e6, (time.process_time() - cpu) / count * 1e6


def idle_us() -> list[float]:
    """Microseconds of a call after a step at which nothing is due, as at nearly all; not collective."""
    world = World(rank=0, size=2, local_rank=0, devices=(torch.device("cpu"),), control=torch.distributed.group.WORLD)
    found = []
    for _ in range(9):
        agreement = Agreement(world, StopRequest())
        begin = time.perf_counter()
        for step in range(-100_000, 0):  # the first agreement is due at step 0
            agreement.decide(step, save=False)
        found.append((time.perf_counter() - begin) / 100_000 * 1e6)
    return found


def shown(values: list[float], unit: str) -> str:
    return f"{statistics.median(values):9.3f} {unit} [{min(values):.3f} .. {max(values):.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--interval", type=float, default=MAX_INTERVAL_S)
    options = parser.parse_args()
    if "RANK" in os.environ:
        be_rank(options)
        return
    run_as_ranks(options.ranks)


if __name__ == "__main__":
    main()
