"""Runs of a search that are trained by writing the records of a training."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpctrain.run.directory import RunDirectory
from hpctrain.run.evaluation import EvaluationRecord, Score
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason
from hpctrain.run.sweep_record import SweepRecord
from hpctrain.search.journal import SearchDecision
from hpctrain.search.search import Search

LAST_RUNG = 5


def prepared(folder: Path, num_runs: int) -> RunDirectory:
    """Make the folder of a sweep with runs."""
    home = RunDirectory.at(folder)
    for run in range(num_runs):
        directory = RunDirectory.at(home.path / str(run))
        directory.create(0o750)
        directory.config.write_text("task: {}\n")
    (home.path / "search").mkdir(exist_ok=True)
    return home


def record_of(home: RunDirectory, kind: str, **options: Any) -> SweepRecord:
    """Make the record of a search, with an empty space unless it is given."""
    values: dict[str, Any] = {"space": {}, "fixed": [], "folder": str(home.path), "submitted": 0.0, "command": []}
    return SweepRecord(kind=kind, **(values | options))


def asha(home: RunDirectory, *, clock: Callable[[], float] = time.time, **options: Any) -> Search:
    return Search(home, record_of(home, "asha", min_steps=10, reduction_factor=3, **options), clock=clock)


def train(search: Search, begin: SearchDecision, value: float, *, reason: Reason = Reason.PAUSED) -> None:
    """Record an attempt that ended at the rung with this accuracy; at the last one, the run completes."""
    if reason is Reason.PAUSED and begin.rung == LAST_RUNG:
        reason = Reason.COMPLETED
    directory = search.directory(begin.run)
    ledger = Ledger(directory)
    attempt = ledger.claim()
    ledger.start(attempt, job_id=None, nodes=[], world_size=1, step=0)
    step = search.algorithm.pause_at_step(begin.rung) or 100
    score = Score("accuracy", "max", value)
    record = EvaluationRecord(step=step, means={"eval/accuracy": value}, best=score, best_step=step)
    record.write(directory.attempt(attempt))
    ledger.end(attempt, reason=reason, step=step)
