"""`python -m hpctrain status [RUN ...]`: what has become of the runs."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpctrain.cli.jobs import ask
from hpctrain.cli.status_text import detail, table
from hpctrain.errors import ExitCode
from hpctrain.run.directory import RunDirectory
from hpctrain.status.report import RunStatus, job_ids, read_status
from hpctrain.status.search import find_runs, runs_of

SHOWN = 20
"""Runs in the table without --all."""

_EPILOG = f"""\
examples:
  python -m hpctrain status                                     # the {SHOWN} newest runs under runs/
  python -m hpctrain status runs/digits/2026-01-31_12-00-00     # one run: attempts, metrics, what to type next
  python -m hpctrain status sweep --json                        # all runs under runs/sweep

States: queued starting running interrupted completed failed cancelled unknown. An interrupted run was stopped, or died
without a word, and goes on with `resume`. Works without SLURM and without its accounting, then from the run directories
alone.

--json prints one object for one run, a list of them otherwise; times are epoch seconds; a metric that is null was NaN
or infinite.

Exit code 0; 2 where a RUN is none."""


def main(arguments: list[str]) -> int:
    """Show runs; `arguments` are those after the word `status`."""
    parser = argparse.ArgumentParser(
        prog="python -m hpctrain status",
        description="Show the runs under a folder, newest first, or one run in detail.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", help="a run directory, or its name under the folder of runs")
    parser.add_argument("--runs-dir", default="runs", metavar="FOLDER", help="the folder of runs (runs)")
    parser.add_argument("--json", action="store_true", help="JSON instead of text")
    parser.add_argument("--all", action="store_true", help=f"all runs, not just the {SHOWN} newest")
    options = parser.parse_args(arguments)
    runs_dir = Path(options.runs_dir)
    if options.runs:
        found = list(dict.fromkeys(run for typed in options.runs for run in runs_of(typed, runs_dir)))
    else:
        found = find_runs(runs_dir)
    shown = found if options.all or options.runs else found[:SHOWN]
    statuses = read_statuses(shown)
    single = len(options.runs) == 1 and len(statuses) == 1
    if options.json:
        records = [as_json(status) for status in statuses]
        print(json.dumps(records[0] if single else records, indent=2, allow_nan=False))
    elif single:
        print(detail(statuses[0], time.time()))
    elif statuses:
        columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print(table(statuses, runs_dir, time.time(), columns))
        if len(shown) < len(found):
            print(f"{len(found) - len(shown)} older runs: --all shows them")
    else:
        print(f"no runs under {runs_dir}/; `python -m hpctrain` starts one")
    return ExitCode.FINISHED


def read_statuses(directories: Sequence[RunDirectory]) -> list[RunStatus]:
    """The statuses of runs; the scheduler is asked once for all of them."""
    ids = {directory: job_ids(directory) for directory in directories}
    jobs = ask([job_id for of_one in ids.values() for job_id in of_one])
    return [read_status(directory, jobs, time.time) for directory in directories]


def as_json(status: RunStatus) -> dict[str, Any]:
    """A status as plain values that JSON can hold."""
    record = asdict(status)
    record["path"] = str(status.path)
    record["metrics"] = {
        name: value if math.isfinite(value) else None for name, value in sorted(status.metrics.items())
    }
    spent = status.account.spent
    record["account"] |= {"ratio": spent.ratio, "wall_s": spent.total_s, "shares": spent.shares}
    return record
