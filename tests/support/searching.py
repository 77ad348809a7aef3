"""Runs of a search that are trained by writing the records of a training."""

from __future__ import annotations

from pathlib import Path

from hpctrain.run.directory import RunDirectory
from hpctrain.run.evaluation import EvaluationRecord, Score
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason
from hpctrain.search.asha import Asha
from hpctrain.search.search import Assignment, Search

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


def asha(home: RunDirectory, **options: float) -> Search:
    return Search(home, Asha(home, min_steps=10, reduction_factor=3), **options)


def train(search: Search, assignment: Assignment, value: float, *, reason: Reason = Reason.PAUSED) -> None:
    """Record an attempt that ended at the rung with this accuracy; at the last one, the run completes."""
    if reason is Reason.PAUSED and assignment.rung == LAST_RUNG:
        reason = Reason.COMPLETED
    directory = search.directory(assignment.run)
    ledger = Ledger(directory)
    attempt = ledger.claim()
    ledger.start(attempt, job_id=None, nodes=[], world_size=1, step=0)
    step = assignment.pause_at_step or 100
    score = Score("accuracy", "max", value)
    record = EvaluationRecord(step=step, means={"eval/accuracy": value}, best=score, best_step=step)
    record.write(directory.attempt(attempt))
    ledger.end(attempt, reason=reason, step=step)
