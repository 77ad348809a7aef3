"""A few steps looked at closely, and what they tell about the whole attempt."""

from __future__ import annotations

import socket
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext

from hpctrain.data.loader import MicroBatch
from hpctrain.distributed.world import World
from hpctrain.metrics.memory import Memory
from hpctrain.train.profiling.device_syncs import named_syncs
from hpctrain.train.profiling.growth import Growth
from hpctrain.train.profiling.measurements import RankReport
from hpctrain.train.profiling.stopwatch import stopwatch
from hpctrain.train.profiling.timed_step import PartTimer
from hpctrain.train.step import TrainStep

LOOK_EVERY_S = 0.25
"""Between timed steps; a look costs microseconds on a CPU and a tenth of a millisecond on a GPU."""
AT_ONCE = 3
"""Steps that are timed one after another at the start: for runs that are short."""
SYNC_LOOKS = 6
"""Timed steps in which waits for the GPU are looked for."""
VARIED = 7
"""Strides differ by up to so many steps."""
LONGEST_STRIDE = 1000
"""Steps; for a run whose steps get much longer later on."""
MEMORY_EVERY_S = 0.05


class Measuring:
    """Times some steps on one rank, at a cost that is a share of the time; the loop asks by comparing `next_step`.

    Args:
        step: the step of the training.
        world: the ranks.
        start_step: completed steps at the start of the attempt; the first new one isn't timed: it is cold.
        waited_s: seconds that this rank has waited for its data so far.
        clock: monotonic seconds.

    Attributes:
        next_step: completed steps before the next step to be looked at.
        growth: of the memory in use.
        memory: of this rank's device.
    """

    def __init__(
        self,
        step: TrainStep,
        world: World,
        *,
        start_step: int,
        waited_s: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._world, self._clock, self._waited_s = world, clock, waited_s
        self._watch = stopwatch(world.device)
        self._step = step
        self._timer = PartTimer(step.model, self._watch)
        self._totals: defaultdict[str, float] = defaultdict(float)
        self._steps_timed = self._looks = self._sync_looks = 0
        self._syncs: Counter[str] = Counter()
        self._looked_at: tuple[int, float] | None = None
        self._begun: tuple[int, float] | None = None
        self.growth, self.memory = Growth(), Memory(world.device)
        self._memory_at = float("-inf")
        self.next_step = start_step + 1

    def __call__(self, step: int, micro_batches: Iterator[MicroBatch]) -> None:
        """Do step ``step``, counted from 0, and time it; collective."""
        now = self._clock()
        if self._begun is None:
            self._begun = step, self._waited_s()
        looks_for_syncs = self._world.device.type == "cuda" and self._sync_looks < SYNC_LOOKS
        with named_syncs(self._syncs) if looks_for_syncs else nullcontext():
            self._step(step, micro_batches, self._timer)
        self._sync_looks += looks_for_syncs
        self._take()
        self.next_step = step + self._stride(step, now)

    def look_at_memory(self, step: int) -> None:
        """Note what is in use after ``step`` completed steps; at most every `MEMORY_EVERY_S`."""
        now = self._clock()
        if now - self._memory_at >= MEMORY_EVERY_S:
            self._memory_at = now
            self.growth.look(step, self.memory.used())

    def report(self, step: int) -> RankReport:
        """What is known of this rank after ``step`` completed steps."""
        self._take()
        parts = {part: seconds / self._steps_timed for part, seconds in self._totals.items()}
        if parts and self._world.device.type == "cpu" and self._begun is not None and step > self._begun[0]:
            # known for every step, not for the timed ones alone
            parts["data"] = (self._waited_s() - self._begun[1]) / (step - self._begun[0])
        return RankReport(
            rank=self._world.rank,
            host=socket.gethostname(),
            steps_timed=self._steps_timed,
            parts=parts,
            memory_peak_bytes=self.memory.peak(),
            growth_bytes=self.growth.bytes_per_step(),
            syncs={place: times / self._sync_looks for place, times in self._syncs.items()},
        )

    def data_share(self, before: tuple[float, float] | None) -> tuple[float, tuple[float, float]]:
        """The share of the time in which this rank waited for data since ``before``, and what to give the next time.

        On a GPU it is the share in all timed steps so far: what the host waits for isn't yet missed by the device.
        """
        now = self._waited_s(), self._clock()
        if self._world.device.type == "cuda":
            total = sum(self._totals.values())
            return (self._totals["data"] / total if total > 0 else 0.0), now
        if before is None or now[1] <= before[1]:
            return 0.0, now
        return (now[0] - before[0]) / (now[1] - before[1]), now

    def _take(self) -> None:
        for laps in self._watch.take():
            self._steps_timed += 1
            for part, seconds in laps.items():
                self._totals[part] += seconds

    def _stride(self, step: int, now: float) -> int:
        """Steps to the next look; varied, so that looks and log records don't fall on the same steps for ever."""
        self._looks += 1
        before, self._looked_at = self._looked_at, (step, now)
        if before is None or self._looks <= AT_ONCE:
            return 1
        per_step_s = (now - before[1]) / max(1, step - before[0])
        stride = min(LONGEST_STRIDE, int(LOOK_EVERY_S / max(per_step_s, 1e-6)))
        return stride + self._looks % VARIED if stride > VARIED else max(1, stride)
