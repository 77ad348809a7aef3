"""The runs under a folder, watched together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from hpctrain.files import describe_os_error
from hpctrain.run.directory import RunDirectory
from hpctrain.status.jobs import Ask, JobQuery, ask_slurm
from hpctrain.status.runs import find_runs
from hpctrain.streams import Printer
from hpctrain.top.watched_run import WatchedRun

FIND_EVERY_S = 10.0
"""Seconds between two searches for runs that have appeared."""


class Watch:
    """The runs at and under a folder, in which runs may appear and vanish.

    One thread calls `look`, and another one `ask`, which may wait for SLURM; both may read the attributes.

    Args:
        root: the folder; it need not exist.
        clock: monotonic seconds.
        ask: as `ask_slurm`.

    Attributes:
        root: the folder.
        runs: newest first.
        query: SLURM's answers.
        has_looked: whether all runs have been read once.
        problem: why runs couldn't be searched for at the last look; empty without a problem.
    """

    def __init__(
        self,
        root: Path,
        clock: Callable[[], float] = time.monotonic,
        ask: Ask = ask_slurm,
    ) -> None:
        self.root = root
        self.runs: tuple[WatchedRun, ...] = ()
        self.query = JobQuery(clock, ask)
        self._clock = clock
        self.has_looked = False
        self.problem = ""
        self._found_at = float("-inf")

    def look(self) -> None:
        """Read what is new of all runs."""
        if self._clock() - self._found_at >= FIND_EVERY_S:
            try:
                self._find()
                self.problem = ""
            except OSError as error:
                self.problem = describe_os_error(error)
            self._found_at = self._clock()
        answers = self.query.answers
        for run in self.runs:
            run.look(answers)
        self.has_looked = True
        if any(run.gone for run in self.runs):
            self.runs = tuple(run for run in self.runs if not run.gone)

    def find_soon(self) -> None:
        """Search for runs at the next look."""
        self._found_at = float("-inf")

    def ask(self, warn: Printer) -> bool:
        """Ask SLURM about all jobs that may change, if that is due; return whether it was asked.

        Args:
            warn: gets a line if SLURM is there and doesn't answer.
        """
        if not (self.has_looked and self.query.is_due):
            return False
        wanted = [job_id for run in self.runs if not run.settled for job_id in run.status.job_ids]
        self.query.ask(wanted, warn)
        return bool(wanted)

    def _find(self) -> None:
        known = {run.directory.path: run for run in self.runs}
        found = find_runs(self.root)
        self.runs = tuple(known.get(run.path) or WatchedRun(run, self._name(run), self._clock) for run in found)

    def _name(self, run: RunDirectory) -> str:
        name = os.path.relpath(run.path, self.root)
        return run.path.name if name == "." else name
