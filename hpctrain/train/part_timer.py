"""Time the parts of a step, by events in a GPU's stream or by the host's clock."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

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
    watched in the next backward pass.

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
        found = []
        # an event whose work is still queued has no time yet, and waiting for it would stall the host
        while self._steps and self._steps[0][-1][1].query():
            laps: dict[str, float] = {}
            for (_, before), (part, now) in itertools.pairwise(self._steps.popleft()):
                laps[part] = laps.get(part, 0.0) + before.elapsed_time(now) / 1000
            found.append(laps)
        return found

    def _event(self) -> HostEvent | torch.cuda.Event:
        if self._device.type != "cuda":
            return HostEvent(self._clock)
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        event.record(torch.cuda.current_stream(self._device))
        return event
