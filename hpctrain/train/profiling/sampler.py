"""Measure a few steps of one rank closely, as a sample of the whole attempt."""

from __future__ import annotations

import itertools
import os
import socket
import sys
import time
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hpctrain.data.loader import TrainLoader
from hpctrain.data.micro_batch import MicroBatch
from hpctrain.metrics.memory import Memory
from hpctrain.rank.world import World
from hpctrain.train.profiling.bottleneck import RankReport
from hpctrain.train.step import TrainStep

SAMPLE_EVERY_S = 0.25
"""Seconds between timed steps; timing one costs microseconds on a CPU and a tenth of a millisecond on a GPU."""
SAMPLES_AT_START = 3
"""Consecutive timed steps at the start, for short runs."""
SYNC_SAMPLES = 6
"""Timed steps in which waits for the GPU are counted."""
VARIATION = 7
"""Strides between timed steps vary by less than this number of steps."""
LONGEST_STRIDE = 1000
"""Most steps between timed ones, for runs whose steps get much longer later on."""
MEMORY_EVERY_S = 0.05


MAX_READINGS = 64
"""Readings to keep; beyond this, every other one is dropped, and new ones are taken half as often."""
MIN_READINGS = 6
"""Readings needed to distinguish growth from noise."""
NOTEWORTHY_BYTES = 16 * 2**20
NOTEWORTHY_SHARE = 0.05
"""Growth below this size, or below this share of the memory in use, isn't reported."""
STEADY = 0.5
"""Least growth of the second half, relative to the first: caches fill up and then stop growing."""


class MemoryGrowth:
    """Readings of the memory in use, thinned out so that they span the attempt."""

    def __init__(self) -> None:
        self._readings: list[tuple[int, int]] = []
        self._every = 1
        self._num_added = 0

    def add(self, step: int, used_bytes: int) -> None:
        """Add the memory in use after ``step`` completed steps; always read at the same place of a step."""
        self._num_added += 1
        if self._num_added % self._every:
            return
        self._readings.append((step, used_bytes))
        if len(self._readings) > MAX_READINGS:
            self._readings = self._readings[::2]
            self._every *= 2

    def bytes_per_step(self) -> float:
        """Return the growth of memory use per step if it is steady and noticeable; otherwise 0."""
        # leave out the first quarter, in which allocators, caches and optimizers reach their size
        readings = self._readings[len(self._readings) // 4 :]
        if len(readings) < MIN_READINGS:
            return 0.0
        begin, middle, end = readings[0], readings[len(readings) // 2], readings[-1]
        grown = end[1] - begin[1]
        if grown < max(NOTEWORTHY_BYTES, NOTEWORTHY_SHARE * begin[1]):
            return 0.0
        early, late = _slope(begin, middle), _slope(middle, end)
        third = len(readings) // 3
        ever_higher = max(used_bytes for _, used_bytes in readings[:third]) < min(
            used_bytes for _, used_bytes in readings[-third:]
        )
        if early <= 0 or late < STEADY * early or not ever_higher:
            return 0.0
        return _slope(begin, end)


def _slope(begin: tuple[int, int], end: tuple[int, int]) -> float:
    return (end[1] - begin[1]) / max(1, end[0] - begin[0])


MAX_UNREAD = 8
"""Most steps with unread events; beyond this, the oldest is dropped."""


class HostEvent:
    """The methods of `torch.cuda.Event` that `PartTimer` calls, by the host's clock: on a CPU, calls block.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._at_s = clock()

    def query(self) -> bool:
        """Whether the event has happened."""
        return True

    def elapsed_time(self, end: HostEvent) -> float:
        """Milliseconds from this event to a later one."""
        return (end._at_s - self._at_s) * 1000


class LastGradient:
    """Detects when a rank has all of its own gradients during a backward pass, by hooks on the parameters.

    The hooks run before DDP sends the gradient. In the first backward pass every parameter has one; after that only the
    parameter whose gradient came last, which costs next to nothing. If that one gets no gradient, all parameters are
    watched in the next backward pass. DDP's own statistics are private, and on a GPU they wait for their events.

    Args:
        parameters: of the replica that require a gradient.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._all = list(parameters)
        self._watched = self._all
        self._handles: list[RemovableHandle] = []
        self._last: Tensor | None = None

    def watch(self, on_gradient: Callable[[], None]) -> None:
        """Call ``on_gradient`` in the next backward for each gradient that is watched; call this after the forward."""

        def note(parameter: Tensor) -> None:
            self._last = parameter
            on_gradient()

        self._last = None
        # not before the forward: torch.compile guards on hooks, and would compile again
        self._handles = [
            parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]  # torch leaves it untyped
            for parameter in self._watched
        ]

    def settle(self) -> bool:
        """Remove the hooks; return whether one was called since `watch`."""
        if not self._handles:
            return False
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._watched = self._all if self._last is None else [p for p in self._all if p is self._last]
        return self._last is not None


class PartTimer:
    """Times the parts of a step (`hpctrain.run.bottleneck.STEP_PARTS`) for `TrainStep`.

    On a GPU it reads events in the current stream, and the host never waits for them: the time between two events is
    the device's, idle time included; "data" is idle time alone.

    With several ranks, ``gradient_sync`` is the time after a rank's own last gradient, in the backward pass that
    synchronises.

    Args:
        device: on which the step runs.
        clock: monotonic seconds, for a CPU.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._device = device
        self._clock = clock
        self._steps: deque[list[tuple[str, Any]]] = deque(maxlen=MAX_UNREAD)
        # by their parameters: those of each turn, and more of them once some are unfrozen
        self._last_gradients: dict[tuple[int, int], LastGradient] = {}
        self._watching: LastGradient | None = None

    def begin(self) -> None:
        """Begin a step."""
        self._steps.append([("", self._event())])

    def mark(self, part: str) -> None:
        """Count the time since the last mark as ``part``; a part may come several times."""
        self._steps[-1].append((part, self._event()))

    def forward_done(self, trained: Sequence[nn.Parameter], *, synchronises: bool) -> None:
        """Mark the forward pass of a micro-batch.

        Args:
            trained: parameters that get a gradient in the backward pass that follows.
            synchronises: it reduces the gradients over the ranks.
        """
        self.mark("forward")
        if synchronises and trained:
            key = id(trained[0]), len(trained)
            if key not in self._last_gradients:
                self._last_gradients[key] = LastGradient(trained)
            self._watching = self._last_gradients[key]
            self._watching.watch(lambda: self.mark("backward"))

    def backward_done(self) -> None:
        """Mark the backward pass of a micro-batch."""
        watching, self._watching = self._watching, None
        self.mark("gradient_sync" if watching is not None and watching.settle() else "backward")

    def take(self) -> list[dict[str, float]]:
        """Return the seconds by part of each step whose times are known by now; each step is returned once."""
        laps_by_step = []
        # an event whose work is still queued has no time yet, and waiting for it would stall the host
        while self._steps and self._steps[0][-1][1].query():
            laps: dict[str, float] = {}
            for (_, before), (part, now) in itertools.pairwise(self._steps.popleft()):
                laps[part] = laps.get(part, 0.0) + before.elapsed_time(now) / 1000
            laps_by_step.append(laps)
        return laps_by_step

    def _event(self) -> HostEvent | torch.cuda.Event:
        if self._device.type != "cuda":
            return HostEvent(self._clock)
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        event.record(torch.cuda.current_stream(self._device))
        return event


@dataclass(eq=False)
class StepSampler:
    """Times some steps on one rank, at most every `SAMPLE_EVERY_S`: the cost is a share of the time, not of the steps.

    Attributes:
        train_step: the step of the training.
        world: the ranks.
        loader: of this rank's training batches; it measures its waits in every step.
        next_step: completed steps before the next step to be timed; the loop compares it. The first one of an attempt
            is cold, and isn't timed.
        clock: monotonic seconds.
        growth: of the memory in use.
        memory: of this rank's device.
    """

    train_step: TrainStep
    world: World
    loader: TrainLoader
    _: KW_ONLY
    next_step: int
    clock: Callable[[], float] = time.monotonic
    growth: MemoryGrowth = field(default_factory=MemoryGrowth, init=False)
    _steps_timed: int = field(default=0, init=False)
    _samples: int = field(default=0, init=False)
    _sync_samples: int = field(default=0, init=False)
    _syncs: Counter[str] = field(default_factory=Counter, init=False)
    _last_sample: tuple[int, float] | None = field(default=None, init=False)
    _begun: tuple[int, float] | None = field(default=None, init=False)
    _last_wait: tuple[float, float] | None = field(default=None, init=False)
    _memory_at: float = field(default=float("-inf"), init=False)

    def __post_init__(self) -> None:
        self.memory = Memory(self.world.device)
        self._timer = PartTimer(self.world.device)
        self._totals: defaultdict[str, float] = defaultdict(float)

    def do_step(self, step: int, micro_batches: Iterator[MicroBatch]) -> None:
        """Run step ``step``, counted from 0, and time it; collective."""
        now = self.clock()
        if self._begun is None:
            self._begun = step, self.loader.waited_s
        counts_syncs = self.world.device.type == "cuda" and self._sync_samples < SYNC_SAMPLES
        with counted_syncs(self._syncs) if counts_syncs else nullcontext():
            self.train_step(step, micro_batches, self._timer)
        self._sync_samples += counts_syncs
        self._take()
        self.next_step = step + self._stride(step, now)

    def read_memory(self, step: int) -> None:
        """Read the memory in use after ``step`` completed steps, at most every `MEMORY_EVERY_S`."""
        now = self.clock()
        if now - self._memory_at >= MEMORY_EVERY_S:
            self._memory_at = now
            self.growth.add(step, self.memory.used())

    def report(self, step: int) -> RankReport:
        """Return this rank's report after ``step`` completed steps."""
        self._take()
        parts = {part: seconds / self._steps_timed for part, seconds in self._totals.items()}
        steps_loaded = 0
        if parts and self.world.device.type == "cpu" and self._begun is not None and step > self._begun[0]:
            # exact, while the timed steps are only a sample, which may miss a stall that comes once in a thousand steps
            steps_loaded = step - self._begun[0]
            parts["data"] = (self.loader.waited_s - self._begun[1]) / steps_loaded
        return RankReport(
            rank=self.world.rank,
            host=socket.gethostname(),
            steps_timed=self._steps_timed,
            steps_loaded=steps_loaded,
            parts=parts,
            memory_peak_bytes=self.memory.peak(),
            growth_bytes=self.growth.bytes_per_step(),
            syncs={place: times / self._sync_samples for place, times in self._syncs.items()},
        )

    def data_share(self) -> float:
        """Return the share of the time in which this rank waited for data since the last call; 0 at the first one.

        On a GPU it is the share in all timed steps so far: while the host waits, the device may still have work queued.
        """
        before, now = self._last_wait, (self.loader.waited_s, self.clock())
        self._last_wait = now
        if self.world.device.type == "cuda":
            total = sum(self._totals.values())
            return self._totals["data"] / total if total > 0 else 0.0
        if before is None or now[1] <= before[1]:
            return 0.0
        return (now[0] - before[0]) / (now[1] - before[1])

    def _take(self) -> None:
        for laps in self._timer.take():
            self._steps_timed += 1
            for part, seconds in laps.items():
                self._totals[part] += seconds

    def _stride(self, step: int, now: float) -> int:
        """Return the number of steps to the next timed one."""
        self._samples += 1
        before, self._last_sample = self._last_sample, (step, now)
        if before is None or self._samples <= SAMPLES_AT_START:
            return 1
        per_step_s = (now - before[1]) / max(1, step - before[0])
        stride = min(LONGEST_STRIDE, int(SAMPLE_EVERY_S / max(per_step_s, 1e-6)))
        # varied, or timed steps and log records might always fall on the same steps
        return stride + self._samples % VARIATION if stride > VARIATION else max(1, stride)


SYNC_WARNING = "called a synchronizing CUDA operation"
"""Start of torch's warning (c10/cuda/CUDAFunctions.cpp)."""
MODE_WARNING = "Synchronization debug mode is a prototype"
"""Start of the warning that torch emits once when the mode is set (torch/csrc/cuda/Module.cpp)."""
_PACKAGE = str(Path(__file__).parents[2]) + os.sep
_USER_LIKE = (f"{_PACKAGE}tasks{os.sep}", f"{_PACKAGE}models{os.sep}")
"""Tasks and models of hpctrain count as a user's: their lines can be changed, or copied."""
_TORCH = str(Path(torch.__file__).parent) + os.sep
_LIBRARY = str(Path(os.__file__).parent) + os.sep


@contextmanager
def counted_syncs(counts: Counter[str], device_mode: ModuleType = torch.cuda) -> Iterator[None]:
    """Count the calls in the ``with`` block that wait for the GPU, by the line that made them.

    The line is the innermost one that is neither torch's nor the standard library's, such as ``task.py:41``; a
    path inside the working directory is relative to it. Waits of hpctrain's own loop aren't counted. Other warnings
    pass.

    Args:
        counts: the counts are added to it.
        device_mode: has `get_sync_debug_mode` and `set_sync_debug_mode`.
    """
    mode = device_mode.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=SYNC_WARNING)
        warnings.filterwarnings("ignore", message=MODE_WARNING)
        show = warnings.showwarning

        # not by `filename`: that is the innermost Python frame, often one of torch's own
        def count(message: Warning | str, *arguments: Any, **keywords: Any) -> None:
            if not str(message).startswith(SYNC_WARNING):
                show(message, *arguments, **keywords)
            elif place := user_line(sys._getframe(1)):
                counts[place] += 1

        warnings.showwarning = count
        device_mode.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            device_mode.set_sync_debug_mode(mode)


def user_line(frame: FrameType | None) -> str | None:
    """Return file and line of the innermost frame of a user's code; None if the search meets hpctrain's own code first.

    Args:
        frame: the innermost frame; the search goes outwards.
    """
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_PACKAGE) and not path.startswith(_USER_LIKE):
            return None
        if not _is_library(path):
            return f"{_short(path)}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def _is_library(path: str) -> bool:
    return path.startswith((_TORCH, "<")) or (path.startswith(_LIBRARY) and "site-packages" not in path)


def _short(path: str) -> str:
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative
