"""Whether the job is being killed, seen while its ranks still save: nobody may be left to go on with it afterwards."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from hpctrain.attempt.taken_away import TakenAway
from hpctrain.errors import HpctrainError
from hpctrain.run.reason import Reason
from hpctrain.supervise.this_job import ThisJob
from hpctrain.supervise.way_on import WayOn

CLAIM_S = 3.0
"""Seconds that a SIGTERM waits for the first attempt: SLURM may have to be asked how earlier ones ended."""

log = logging.getLogger("hpctrain.launch")


@dataclass
class Lookout:
    """Looks at SLURM's cues whether the job is being killed, and asks for its requeue at once.

    Neither the ranks nor this process may live until all is saved and judged. SLURM lets them go on until KillWait is
    over all the same, and starts the job anew when all of its processes are gone (seen on 22.05).

    Args:
        job: around this process.
        way_on: asks for the requeue.
        goes_back: whether the newest attempt, ended for a reason, leads back to the queue.
    """

    job: ThisJob
    way_on: WayOn
    goes_back: Callable[[Reason], bool]
    _found: TakenAway | None = None
    _done: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def heed(self, bell: int) -> None:
        """Look at each SIGTERM.

        Args:
            bell: a file descriptor that gives a signal's number per byte; its end is the end.
        """
        while numbers := os.read(bell, 64):
            for number in numbers:
                log.info("%s noted", signal.Signals(number).name)
            if signal.SIGTERM in numbers:
                self.look()

    def look_beside(self) -> None:
        """Look in another thread, on srun's word that the step is being ended: another cue than the SIGTERM."""
        threading.Thread(target=self.look, daemon=True).start()

    def look(self) -> None:
        """Look whether the job is being killed, and see to what follows."""
        with self._lock:
            if self._done:
                return
            claimed = self.job.wait_for_a_claim(CLAIM_S)  # an attempt's end can be told; else this is the next best
            try:
                self._done = self._look(claimed=claimed)
            except (HpctrainError, OSError) as error:
                log.warning("whether SLURM ends the job could not be seen to: %s", error)

    def why(self, reason: Reason, received: int | None) -> TakenAway | None:
        """How SLURM takes the job away, for an attempt that is over.

        What was found while the job was being killed comes first: once it is requeued, SLURM's record no longer tells a
        time limit from a preemption.

        Args:
            reason: of the attempt's end, as its ranks tell it; if that is SLURM's doing, SLURM isn't asked again.
            received: number of the signal that a rank got, if it is known.
        """
        with self._lock:
            if self._found is not None or reason.meaning.by_slurm:
                return self._found
            return self.job.taken_away(received)

    def _look(self, *, claimed: bool) -> bool:
        """Whether the job is being killed, and all that follows from that was done."""
        found = self.job.taken_away()
        if found is None or not found.killing:
            return False
        if self.job.cancelled:
            found = replace(found, reason=Reason.CANCELLED)
        log.info("SLURM ends the job: %s (%s)", found.reason.value, found.evidence)
        self._found = found
        if found.reason is Reason.CANCELLED:
            self.way_on.cancel()
        if claimed:
            with contextlib.suppress(OSError):  # the requeue matters more
                found.write(self.job.directory.claim(self.job.attempt))
        if found.requeued or found.reason not in (Reason.PREEMPTED, Reason.TIME_LIMIT):
            return claimed
        if not claimed:
            if found.reason is Reason.PREEMPTED:
                self.way_on.requeue_early(self.job.silence_s)
            return False
        return not self.goes_back(found.reason) or self.way_on.requeue_early(self.job.silence_s)
