"""What benchmarks of a mesh share: ranks that have met, and cases that take turns."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.config.compose import Composer
from hpctrain.config.mesh import mesh_shape
from hpctrain.parallel.mesh import TrainingWorld, join_mesh
from hpctrain.rank.compiler import spare_compiler
from hpctrain.rank.rendezvous import meet
from hpctrain.rank.world import join
from hpctrain.train.training import build

Case = tuple[str, Callable[[], object]]
"""A name, and the function to time."""


def join_ranks(count: int, parallel: str) -> TrainingWorld:
    """Make this process one of the ranks, with its share of the cores.

    Args:
        count: number of ranks.
        parallel: the kind of parallelism, as an override.
    """
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // count))
    spare_compiler()
    place = ClusterEnvironment.from_environment(os.environ)
    store = meet(place, init_method="env://", secret=b"s" * 32, token=str(place.master_port), timeout_s=60)
    config = Composer().compose([parallel], world_size=place.world_size)
    shape = mesh_shape(config.parallel, place.world_size, place.local_world_size)
    cpu = (torch.device("cpu"),)
    return join_mesh(join(place, store, backend="gloo", devices=cpu, timeout_s=300), shape, 300)


class OwnSteps:
    """Steps of hpctrain's own loop.

    Args:
        words: the overrides of a training without a last step.
        world: the ranks.
    """

    def __init__(self, words: Sequence[str], world: TrainingWorld) -> None:
        config = Composer().compose([*words, "trainer.max_epochs=100000"], world_size=world.size)
        self.training = build(config, world, only_trains=True)
        self.training.step.prepare(0)
        self.batches = iter(self.training.data.loader(0))
        self.number = 0

    def ten(self) -> None:
        """Make ten steps, and take the means of their losses."""
        for _ in range(10):
            self.training.step(self.number, self.batches)
            self.number += 1
        self.training.meter.means()


def measure(
    world: TrainingWorld, rounds: int, cases: list[Case], *, after: Callable[[], object] = lambda: None
) -> None:
    """Print each case's time on the slowest rank, and its ratio to the first case; collective."""
    times: dict[str, list[float]] = {name: [] for name, _ in cases}
    for number in range(rounds + 1):
        turn = cases[number % len(cases) :] + cases[: number % len(cases)]
        for name, case in turn if number % 2 else turn[::-1]:
            world.barrier()
            begin = time.perf_counter()
            case()
            spent = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
            world.combine_(spent, "max")
            after()
            world.barrier()
            if number:
                times[name].append(float(spent))
    if not world.is_rank_zero:
        return
    first = times[cases[0][0]]
    for name, _ in cases:
        own = times[name]
        ratio = statistics.median(a / b for a, b in zip(own, first, strict=True))
        print(
            f"  {name:42s}{statistics.median(own):8.4f} s [{min(own):.4f}..{max(own):.4f}]  x {ratio:.3f}", flush=True
        )
