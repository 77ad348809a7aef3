"""Runs after which another one starts, by their records alone."""

from __future__ import annotations

import json
from pathlib import Path

from hpctrain.run.directory import RunDirectory
from hpctrain.run.job_records import JobRecords
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason


def run_before(path: Path, reason: str = "", *, job_id: str = "", after: tuple[str, ...] = ()) -> RunDirectory:
    """Make a run, submitted as `job_id` if there is one, whose first attempt ended for `reason` if there is one."""
    directory = RunDirectory.at(path)
    directory.create(0o750)
    directory.config.write_text(f"name: other\nafter: {json.dumps(after)}\n")
    if job_id:
        JobRecords(directory).add({"job_id": job_id, "time": 1.0})
    if reason:
        end_attempt(directory, reason, job_id)
    return directory


def end_attempt(directory: RunDirectory, reason: str, job_id: str = "") -> None:
    """Add an attempt that ended for a reason."""
    ledger = Ledger(directory)
    attempt = ledger.claim()
    ledger.start(attempt, job_id=job_id or None, nodes=["n1"], world_size=1, step=0)
    ledger.end(attempt, reason=Reason(reason), step=5, detail="as the test says" if reason == "failed" else "")
