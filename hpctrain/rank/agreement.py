"""Let all ranks decide to stop, to save or to end the run after the same step, without stalling the device.

Why it is like this: docs/adr/0005-the-stop-and-the-requeue.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from hpctrain.rank.stop_request import Stop, StopKind, StopRequest
from hpctrain.rank.world import World

COST_SHARE = 0.005
"""Share of the training time that agreements may cost."""
MAX_INTERVAL_S = 1.0
"""Most seconds between agreements, even if one costs more than its share."""
MAX_STEPS = 1000
"""Most steps between agreements. Each step has its own collective, so one more in a thousand steps costs nothing."""
AT_ONCE_SHARE = 1 / 3
"""Share of `MAX_INTERVAL_S` above which a step is so long that waiting for the result at once costs nothing."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision that all ranks follow after a step.

    Attributes:
        stop: the largest kind and the largest signal of the ranks' stop requests; None without any request.
        save: whether some rank found a save due.
        end: whether some rank wants the run to end.
    """

    stop: Stop | None = None
    save: bool = False
    end: bool = False


NOTHING = Decision()


class Agreement:
    """Combines the flags of all ranks: what one rank requests, all ranks do after the same step.

    After an agreed step each rank begins a small asynchronous all-reduce (maximum) on the control group, and reads the
    result one step later. The result also fixes the step of the next agreement, from the slowest rank's time per step,
    so that all ranks issue the same collectives. In a world of one the rank's own flags are the decision.

    Agreements are as frequent as `COST_SHARE` allows, and a second apart at most. If steps suddenly grow slower, the
    ranks notice a stop that much later; the newest checkpoint limits the loss. On two CPU cores an agreement of two
    ranks takes 0.8 ms (tests/benchmarks/agreement.py), so the interval is 160 ms.

    The steps are counted, since ranks read the clock after different steps, and with an all-reduce by a thread no step
    would be known beforehand. A flag on the GPU would stall it. A late agreement isn't brought forward: that took 180
    lines of locks, for a delay that the short interval makes rare.

    Args:
        world: the ranks.
        stop: this rank's request to stop.
        max_interval_s: seconds between agreements.
        clock: monotonic seconds.

    Attributes:
        waited_s: seconds that this rank has waited for the others' flags.
    """

    def __init__(
        self,
        world: World,
        stop: StopRequest,
        max_interval_s: float = MAX_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._world = world
        self._control = world.control
        self._stop = stop
        self._max_interval_s = max_interval_s
        self._interval_s = max_interval_s
        self._clock = clock
        self._flags = torch.zeros(5, dtype=torch.int64)
        self._work: dist.Work | None = None
        self._next_step = 0
        self._waits_at_once = False
        self._measured: tuple[int, float] | None = None
        self.waited_s = 0.0

    def agree_and_calibrate(self) -> Stop | None:
        """Agree on stops requested before the first step, and measure the cost of an agreement; collective."""
        stop = self.agree_on_stop()
        if self._control is None:
            return stop
        # the ranks are synchronised now, so the next ones measure the collective, not the wait for the slowest rank
        costs_s = []
        for _ in range(3):
            begin = self._clock()
            self._combine(torch.zeros(1))
            costs_s.append(self._clock() - begin)
        cost_s = torch.tensor([min(costs_s)])
        # of the slowest rank: a different interval on each rank would mismatch the collectives
        self._combine(cost_s)
        self._interval_s = min(cost_s.item() / COST_SHARE, self._max_interval_s)
        return stop

    def agree_on_stop(self) -> Stop | None:
        """Agree on a stop now, at the cost of a collective that waits for the slowest rank."""
        stop = self._stop.pending
        if self._control is None:
            return stop
        flags = torch.tensor(_flags(stop))
        self._combine(flags)
        return _stop(*flags.tolist())

    def loading_stop(self, position: Callable[[], str]) -> LoadingStop:
        """Make the `LoadingStop` of this rank; its class explains the argument."""
        return LoadingStop(self._stop, self._world, position)

    def restarted(self) -> Agreement:
        """Make an agreement for steps counted from zero, such as an evaluation's batches, with this one's interval."""
        agreement = Agreement(self._world, self._stop, self._max_interval_s, self._clock)
        agreement._interval_s = self._interval_s
        return agreement

    def decide(self, step: int, *, save: bool, end: bool = False) -> Decision:
        """Decide what to do after ``step``; collective, to be called after every step."""
        if self._control is None:
            stop = self._stop.pending
            return Decision(stop, save, end) if stop or save or end else NOTHING
        if self._work is None:
            if step < self._next_step:
                return NOTHING
            self._work = self._begin(step, save=save, end=end)
            if not self._waits_at_once:
                return NOTHING
        begin = self._clock()
        self._work.wait()
        self.waited_s += self._clock() - begin
        self._work = None
        kind, signal, save_agreed, end_agreed, step_time_us = self._flags.tolist()
        steps = int(self._interval_s * 1e6 / max(step_time_us, 1))
        self._next_step = step + max(1, min(steps, MAX_STEPS))
        self._waits_at_once = step_time_us * 1e-6 >= self._max_interval_s * AT_ONCE_SHARE
        if not (kind or save_agreed or end_agreed):
            return NOTHING
        return Decision(_stop(kind, signal), bool(save_agreed), bool(end_agreed))

    def _begin(self, step: int, *, save: bool, end: bool) -> dist.Work:
        now = self._clock()
        if self._measured is None:
            step_time_s = self._max_interval_s  # not known yet: agree again after the next step
        else:
            measured_step, measured_at = self._measured
            step_time_s = (now - measured_at) / max(step - measured_step, 1)
        self._measured = (step, now)
        self._flags = torch.tensor([*_flags(self._stop.pending), int(save), int(end), int(step_time_s * 1e6)])
        work: dist.Work = dist.all_reduce(self._flags, op=dist.ReduceOp.MAX, group=self._control, async_op=True)
        return work

    def _combine(self, tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._control)


class StopWhileLoading(BaseException):
    """The ranks stop while they wait for a batch. No `Exception`: a dataset may catch those, and try again."""


class LoadingStop:
    """Lets the ranks stop while they wait for a batch, which can take longer than the grace time.

    A rank can't leave alone: others may have their batch, and wait for its gradients. So ranks that wait while a stop
    is requested count themselves in the store. If all of them wait for the batch of the same step, they stop before it.
    If one of them gets its batch first, they don't: the stop follows that step, or SLURM ends the job before. The rank
    that takes the first ticket decides between the two.

    A rank alone stops at once, also while it fetches a batch itself (`fetch`): then the signal's handler raises. It
    does so only where nothing is saved afterwards that the unfinished fetch may have changed, such as the task's state.
    Otherwise, and among several ranks, a rank that fetches batches itself notices nothing until it has its batch.

    Args:
        stop: this rank's request to stop.
        world: the ranks; None if this rank may leave the others.
        position: returns a name of the step, the same on every rank.

    Attributes:
        at_boundary: whether the rank is between two steps, so that its state can be saved.
        interrupts: whether a signal may interrupt a fetch in this process: at first only for a rank alone.
        is_counted: whether this rank has counted itself for the batch that it waits for.
    """

    def __init__(self, stop: StopRequest, world: World | None = None, position: Callable[[], str] = str) -> None:
        self.at_boundary = True
        self.interrupts = world is None or world.store is None
        self.is_counted = False
        self._store = None if world is None else world.store
        self._size = 1 if world is None else world.size
        self._stop = stop
        self._position = position
        self._continues_at = ""

    def poll(self) -> None:
        """Stop if all ranks wait; called repeatedly while this rank waits for loading processes.

        Raises:
            StopWhileLoading: the ranks stop before the step.
        """
        store = self._store
        if not self.at_boundary:
            return
        if store is None:
            if self._stop.pending:
                raise StopWhileLoading
            return
        key = self._key()
        if key == self._continues_at:
            return
        if self.is_counted:
            if store.check([f"{key}/stops"]):
                self._decide(store, key, stops=True)
        elif self._stop.pending or store.check([f"{key}/waiting"]):
            self.is_counted = True
            if store.add(f"{key}/waiting", 1) == self._size:
                self._decide(store, key, stops=True)

    def arrived(self) -> None:
        """Continue with the batch, after this rank has counted itself.

        Raises:
            StopWhileLoading: all ranks have decided to stop already.
        """
        assert self._store is not None
        self._decide(self._store, self._key(), stops=False)

    def fetch(self, fetch: Callable[[Any], Any], request: Any) -> Any:
        """Return what ``fetch`` makes of a request in this process, which a signal interrupts; only if `interrupts`.

        Raises:
            StopWhileLoading: a stop is requested.
        """
        stop = self._stop
        try:
            # once: a second signal must not interrupt what the dataset does to end its read
            stop.call_on_signal(self._interrupt)
            if stop.pending:
                self._interrupt()
            return fetch(request)
        finally:
            stop.call_on_signal(None)

    def _interrupt(self) -> None:
        self._stop.call_on_signal(None)
        raise StopWhileLoading

    def _key(self) -> str:
        return f"hpctrain/loading/{self._position()}"

    def _decide(self, store: Store, key: str, *, stops: bool) -> None:
        """Raise if the ranks stop; ``stops`` counts if nothing is decided yet."""
        if store.add(f"{key}/ticket", 1) == 1:
            store.set(f"{key}/stops", str(int(stops)))
        else:
            stops = store.get(f"{key}/stops") == b"1"
        self.is_counted = False
        self._continues_at = key
        if stops:
            raise StopWhileLoading


def _flags(stop: Stop | None) -> tuple[int, int]:
    """Kind and signal as integers, whose maximum over the ranks counts."""
    return (0, 0) if stop is None else (stop.kind, stop.signal)


def _stop(kind: int, signal: int) -> Stop | None:
    return Stop(StopKind(kind), signal) if kind else None
