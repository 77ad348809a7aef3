"""Ask SLURM about the jobs of many runs again and again, but not often."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from hpctrain.status.report import Ask, Jobs, ask_slurm
from hpctrain.streams import Printer

ASK_EVERY_S = 10.0
"""Seconds between two queries, for all runs together: many users may watch their runs at the same time."""


class JobQuery:
    """SLURM's last answer, for as long as it may be used.

    A controller that falls silent leaves its last answer: it is usually back within minutes.

    Args:
        clock: monotonic seconds.
        ask: as `ask_slurm`.

    Attributes:
        answers: by job id; None if SLURM can't be reached from here.
        asked_at: when it was asked last, on the clock; None before.
        answered_at: when it answered last.
        silent: whether it didn't answer the last query that is over.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, ask: Ask = ask_slurm) -> None:
        self.answers: Jobs | None = {}
        self.asked_at: float | None = None
        self.answered_at: float | None = None
        self.silent = False
        self._clock = clock
        self._ask = ask

    @property
    def is_due(self) -> bool:
        """Whether SLURM may be asked again."""
        return self.asked_at is None or self._clock() - self.asked_at >= ASK_EVERY_S

    def ask(self, job_ids: Sequence[str], warn: Printer) -> Jobs | None:
        """Ask about these jobs if that is due, and return all answers so far, as `ask_slurm`."""
        if job_ids and self.is_due:
            self.asked_at = self._clock()
            answer = self._ask(job_ids, warn)
            self.silent = answer is None
            if answer is not None:
                self.answers = {**(self.answers or {}), **answer}
                self.answered_at = self._clock()
            elif self.answered_at is None:
                self.answers = None
        return self.answers
