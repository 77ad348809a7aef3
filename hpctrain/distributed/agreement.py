"""How the ranks decide together, about once a second, without stalling the device: stop, save."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

import torch
import torch.distributed as dist

from hpctrain.distributed.haste import Haste
from hpctrain.distributed.stop_request import Stop, StopKind
from hpctrain.distributed.world import World

LONGEST_INTERVAL = 65536
"""Steps; bounds what one absurd measurement can do."""
LATE = 1.5
"""Intervals without an agreement after which the next one is late."""
LONG_STEP = 2
"""With so few steps per interval the answer is waited for at once: that is nothing against such a step."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What all ranks do after this step.

    Attributes:
        stop: what asked some rank to stop, the largest kind and the largest signal; None where no rank was asked.
        save: whether some rank found a save due.
    """

    stop: Stop | None = None
    save: bool = False


NOTHING = Decision()


class Agreement:
    """Flags of all ranks, combined: set on one rank, acted upon by all after the same step.

    At an agreed step each rank begins a small asynchronous all-reduce (maximum) on the control group, and reads it one
    step later; what was read also fixes the next such step, from the slowest rank's time per step, so that every rank
    issues the same collectives. In a world of one the flags are the decision.

    A context manager: inside, steps that have grown slow don't delay an agreement (`Haste`). Without it they may.

    Args:
        world: the ranks.
        interval_s: seconds between agreements.
        clock: monotonic seconds.

    Attributes:
        waited_s: seconds that this rank has waited for the others' flags.
    """

    def __init__(self, world: World, interval_s: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._control = world.control
        self._interval_s = interval_s
        self._clock = clock
        self._flags = torch.zeros(4, dtype=torch.int64)
        self._work: dist.Work | None = None
        self._haste = Haste(world.store, world.rank, world.size, LATE * interval_s, clock)
        self._every_step = False
        self._measured: tuple[int, float] | None = None
        self.waited_s = 0.0

    def __enter__(self) -> Agreement:
        """Begin to watch that agreements are in time."""
        self._haste.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Watch no longer; not collective."""
        self._haste.close()

    @property
    def moved(self) -> int:
        """Agreements so far that were brought forward."""
        return self._haste.moved

    def at_once(self, stop: Stop | None) -> Stop | None:
        """What asked any rank to stop, waited for; for the start. Collective."""
        if self._control is None:
            return stop
        flags = torch.tensor(_flags(stop), dtype=torch.int64)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._control)
        return _stop(*flags.tolist())

    def decide(self, step: int, *, stop: Stop | None, save: bool) -> Decision:
        """What to do now that ``step`` is done; collective, to be called after every step."""
        if self._control is None:
            return Decision(stop, save) if stop or save else NOTHING
        haste = self._haste
        haste.at = step
        if self._work is None:
            if haste.holds:
                haste.wait()
            if haste.due is not None and step < haste.due:
                return NOTHING
            if not haste.begin():
                return self.decide(step, stop=stop, save=save)
            self._issue(step, stop=stop, save=save)
            if not self._every_step:
                return NOTHING
        assert self._work is not None
        asked = self._clock()
        self._work.wait()
        self.waited_s += self._clock() - asked
        self._work = None
        kind, signal, save_agreed, step_time_us = self._flags.tolist()
        steps = int(self._interval_s * 1e6 / max(step_time_us, 1))
        haste.end(step + max(1, min(steps, LONGEST_INTERVAL)))
        self._every_step = steps <= LONG_STEP
        return Decision(_stop(kind, signal), bool(save_agreed)) if kind or save_agreed else NOTHING

    def _issue(self, step: int, *, stop: Stop | None, save: bool) -> None:
        now = self._clock()
        if self._measured is None:
            step_time_us = int(self._interval_s * 1e6)
        else:
            measured_step, measured_at = self._measured
            step_time_us = int((now - measured_at) / max(step - measured_step, 1) * 1e6)
        self._measured = (step, now)
        self._flags = torch.tensor((*_flags(stop), int(save), step_time_us), dtype=torch.int64)
        self._work = dist.all_reduce(self._flags, op=dist.ReduceOp.MAX, group=self._control, async_op=True)


def _flags(stop: Stop | None) -> tuple[int, int]:
    """Kind and signal, each of which is combined over the ranks by its maximum."""
    return (0, 0) if stop is None else (stop.kind, stop.signal)


def _stop(kind: int, signal: int) -> Stop | None:
    return Stop(StopKind(kind), signal) if kind else None
