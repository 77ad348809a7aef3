"""Time the parts of a step, by the host's clock or by events in a GPU's stream."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

MAX_UNREAD = 8
"""Most steps with unread events; beyond this, the oldest is dropped."""


class Stopwatch(Protocol):
    """Times the parts of single steps."""

    def begin(self) -> None:
        """Begin a step."""
        ...

    def mark(self, part: str) -> None:
        """Count the time since the last mark as ``part``; a part may come several times."""
        ...

    def take(self) -> list[dict[str, float]]:
        """Return the seconds by part of each step whose times are known by now; each step is returned once."""
        ...


class HostStopwatch:
    """Stopwatch by the host's clock, for devices on which calls are synchronous.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._marks: list[tuple[str, float]] = []

    def begin(self) -> None:
        """See `Stopwatch`."""
        self._marks = [("", self._clock())]

    def mark(self, part: str) -> None:
        """See `Stopwatch`."""
        self._marks.append((part, self._clock()))

    def take(self) -> list[dict[str, float]]:
        """See `Stopwatch`."""
        marks, self._marks = self._marks, []
        laps: dict[str, float] = {}
        for (_, before), (part, now) in itertools.pairwise(marks):
            laps[part] = laps.get(part, 0.0) + now - before
        return [laps] if laps else []


class DeviceStopwatch:
    """Stopwatch by events in the current stream of a CUDA device; the host never waits for them.

    The time between two events is the device's, idle time included; "data" is idle time alone.

    Args:
        device: whose stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps: deque[list[tuple[str, torch.cuda.Event]]] = deque(maxlen=MAX_UNREAD)

    def begin(self) -> None:
        """See `Stopwatch`."""
        self._steps.append([("", self._event())])

    def mark(self, part: str) -> None:
        """See `Stopwatch`."""
        self._steps[-1].append((part, self._event()))

    def take(self) -> list[dict[str, float]]:
        """See `Stopwatch`."""
        found = []
        while self._steps and self._steps[0][-1][1].query():  # type: ignore[no-untyped-call]  # torch leaves it untyped
            marks = self._steps.popleft()
            laps: dict[str, float] = {}
            for (_, before), (part, now) in itertools.pairwise(marks):
                laps[part] = laps.get(part, 0.0) + before.elapsed_time(now) / 1000
            found.append(laps)
        return found

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        event.record(torch.cuda.current_stream(self._device))
        return event


def stopwatch(device: torch.device) -> Stopwatch:
    """Make the stopwatch for a device."""
    return DeviceStopwatch(device) if device.type == "cuda" else HostStopwatch()


class LastGradient:
    """Detects when a rank has all of its own gradients during a backward pass, by hooks on the parameters.

    The hooks run before DDP sends the gradient. In the first backward pass every parameter has one; after that only the
    parameter whose gradient came last, which costs next to nothing. If that one gets no gradient, all parameters are
    watched in the next backward pass.

    Args:
        parameters: of the replica.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._all = [parameter for parameter in parameters if parameter.requires_grad]
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
    """Times the parts of a step (`hpctrain.run.bottleneck.STEP_PARTS`); the `StepTimer` that `TrainStep` takes.

    With several ranks, ``gradient_sync`` is the time after a rank's own last gradient, in the backward pass that
    synchronises.

    Args:
        model: of the step.
        watch: takes the marks.
    """

    def __init__(self, model: nn.Module, watch: Stopwatch) -> None:
        self._watch = watch
        self._last_gradient = LastGradient(model.parameters())

    def begin(self) -> None:
        """See `StepTimer`."""
        self._watch.begin()

    def data_done(self) -> None:
        """See `StepTimer`."""
        self._watch.mark("data")

    def forward_done(self, *, synchronises: bool) -> None:
        """See `StepTimer`."""
        self._watch.mark("forward")
        if synchronises:
            self._last_gradient.watch(lambda: self._watch.mark("backward"))

    def backward_done(self) -> None:
        """See `StepTimer`."""
        self._watch.mark("gradient_sync" if self._last_gradient.settle() else "backward")

    def update_done(self) -> None:
        """See `StepTimer`."""
        self._watch.mark("optimizer")
