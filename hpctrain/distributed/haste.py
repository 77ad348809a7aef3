"""An agreement that has become late is brought forward, to the same nearer step on all ranks."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator

from torch._C._distributed_c10d import Store

TICK_S = 0.2
"""Seconds between two looks of a rank's thread."""
POLL_S = 0.005
"""Seconds until the first look at the store for what the others have said."""
CLOSE_S = 5.0
"""Bound on the end of the thread: a store whose machine is gone may not answer for long."""
PASSED = 0
"""Said in place of a step by a rank that has begun the agreement meanwhile, or has left the loop."""

ASYNCHRONOUS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)

log = logging.getLogger("hpctrain.train")


class Haste:
    """Watches one agreement after the other from a thread of its own, which does nothing as long as they are in time.

    The step of the next agreement is counted ahead from the time that steps took. When they suddenly take much longer
    it may be hours away, and nobody may choose another one alone. So, in two turns over the store where the ranks met:

    1. Each rank whose clock says that agreement number n is late says so. A rank that has begun n never does; so either
       all ranks say it, or some rank begins n, and then all do, soon.
    2. Once all have said it, each rank keeps its loop from going beyond the step that it is in, and says which one that
       is. The largest of these is the step of agreement n; nobody is beyond it. If some rank has begun n meanwhile,
       nothing is changed, since then all have that step before them.

    The loop is kept for as long as it takes the others' threads to look, up to `TICK_S`, and once per change of speed.

    Args:
        store: of all ranks; None in a world of one.
        rank: of this process.
        size: number of ranks.
        late_s: seconds after the last agreement from which on the next one is late.
        clock: monotonic seconds.

    Attributes:
        at: the step after which this rank was here last.
        due: the step of the next agreement; None while nobody knows.
        begun: agreements that this rank has begun.
        ended: agreements of which this rank has read the outcome.
        holds: the loop must `wait`.
        moved: agreements that were brought forward.
    """

    def __init__(
        self, store: Store | None, rank: int, size: int, late_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._late_s, self._clock = late_s, clock
        self._ended_at = clock()
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        self.at = 0
        self.due: int | None = None
        self.begun = self.ended = self.moved = 0
        self._sought = -1  # the last agreement for which a nearer step was sought: once is enough
        self.holds = False

    def start(self) -> None:
        """Begin to watch."""
        if self._store is None:
            return
        self._say(-1, PASSED)
        self._thread = threading.Thread(target=self._watch, name="hpctrain-haste", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Watch no longer, and keep nobody waiting for this rank."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def begin(self) -> bool:
        """Begin the agreement that is due on this rank, unless another step is being sought for it."""
        with self._lock:
            if self.holds:
                return False
            self.begun += 1
            return True

    def end(self, due: int) -> None:
        """Its outcome was read; the next one is due after step ``due``."""
        self.due, self._ended_at = due, self._clock()
        self.ended += 1

    def wait(self) -> None:
        """Wait until the step of the next agreement is known."""
        while self.holds:
            time.sleep(POLL_S)  # in this file, so that the watchdog sees a rank that waits for others

    def _watch(self) -> None:
        # another thread's mask may leave this one as the only thread that a signal can go to
        signal.pthread_sigmask(signal.SIG_BLOCK, ASYNCHRONOUS)
        try:
            while not self._closed.wait(TICK_S):
                if self._late():
                    self._hasten()
        except RuntimeError as error:
            # the store went with rank zero: the training will notice by itself
            log.debug("no agreement can be brought forward any more: %s", error)
        finally:
            self.holds = False

    def _late(self) -> bool:
        due = self.due
        if due is None or self.begun != self.ended or self.at + 1 >= due or self._sought == self.begun:
            return False
        return self._clock() - self._ended_at > self._late_s

    def _hasten(self) -> None:
        with self._lock:
            # nobody begins the agreement while this rank says that it is late
            if not self._late():
                return
            self._sought = number = self.begun
            count = self._count_late(number, 1)
        pauses = _pauses()
        while count < self._size:
            # in this order: once this rank knows that all have begun it, no other one can say that it is late
            settled, closed = self.ended > number, self._closed.wait(next(pauses))
            count = self._count_late(number, 0)
            if count < self._size and (settled or closed):
                self._say(number, PASSED)
                return
        with self._lock:
            step = PASSED
            if self.begun == number and not self._closed.is_set():
                self.holds = True
                step = self.at + 1
        self._say(number, step)
        steps = self._collect(number)
        with self._lock:
            if steps and PASSED not in steps:
                self.due = max(steps)
                self.moved += 1
        self.holds = False

    def _count_late(self, number: int, more: int) -> int:
        assert self._store is not None
        return int(self._store.add(f"hpctrain/late/{number}", more))

    def _say(self, number: int, step: int) -> None:
        assert self._store is not None
        self._store.set(f"hpctrain/step/{self._rank}", f"{number}:{step}")

    def _collect(self, number: int) -> list[int]:
        """What all ranks said of an agreement; empty where this rank has left the loop meanwhile."""
        assert self._store is not None
        names, pauses = [f"hpctrain/step/{rank}" for rank in range(self._size)], _pauses()
        while not self._closed.is_set():
            if self._store.check(names):
                said = [tuple(map(int, value.split(b":"))) for value in self._store.multi_get(names)]
                if all(spoken_of >= number for spoken_of, _ in said):
                    # whoever speaks of a later one has passed this one
                    return [step if spoken_of == number else PASSED for spoken_of, step in said]
            self._closed.wait(next(pauses))
        return []


def _pauses() -> Iterator[float]:
    """Seconds between looks at the store; many ranks look, and it may take them long."""
    pause_s = POLL_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, TICK_S)
