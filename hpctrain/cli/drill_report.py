"""What the commands `drill` and `drill run` print and have in common."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpctrain.cli.table import aligned
from hpctrain.config.cluster import Slurm
from hpctrain.config.resources import resources_of
from hpctrain.config.run_config import RunConfig
from hpctrain.drill.comparison import Row
from hpctrain.drill.console import Console
from hpctrain.drill.drill import Drill, Report, stopped_after
from hpctrain.drill.stop_signals import stop_signals_raised, stopped_by
from hpctrain.errors import ExitCode, RunDirectoryError, RunFailedError
from hpctrain.launch.prepare import claim_default_path
from hpctrain.phrases import counted, numbered
from hpctrain.run.directory import RunDirectory

MAX_CELL_CHARS = 28
"""The table cuts longer cells, such as digests."""


def add_drill_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of every drill."""
    parser.add_argument(
        "--interruptions", type=_count, default=3, metavar="N", help="how often to interrupt (default: 3)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the random moments and signals (default: 0)"
    )
    parser.add_argument("--remove", action="store_true", help="remove both runs if nothing differs")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")


def drill_home(config: RunConfig) -> Path:
    """Create the folder of both runs.

    Raises:
        RunDirectoryError: the folder isn't empty, or can't be created.
    """
    home = RunDirectory.at(config.run_dir or claim_default_path("drill"))
    if home.path.is_dir() and any(home.path.iterdir()):
        raise RunDirectoryError(f"run_dir={config.run_dir}: the folder isn't empty; name a new one for the drill")
    home.create_for_sweep(config.mode)
    return home.path


def drill_console(options: argparse.Namespace, config: RunConfig, home: Path) -> Console:
    """Return the display of a drill's progress, and report its start."""
    console = Console(sys.stderr if options.json else sys.stdout)
    ranks = counted(resources_of(config).world_size, "rank")
    where = "SLURM" if isinstance(config.cluster, Slurm) else "this machine"
    console.report(f"drill of {config.name} with {ranks} on {where}, in {os.path.relpath(home)}")
    return console


def run_drill(drill: Drill, options: argparse.Namespace) -> int:
    """Run a drill, and print its result; return the exit code.

    Raises:
        RunFailedError: one of its runs failed, or their results can't be compared.
    """
    try:
        with stop_signals_raised():
            report = drill.run()
    except RunFailedError as error:
        raise RunFailedError(f"{error}\n{_repeat_advice(drill.home, options)}") from error
    except KeyboardInterrupt as interrupt:
        home = os.path.relpath(drill.home)
        with contextlib.suppress(OSError):  # the terminal was closed
            stopped = (
                f"{stopped_by(interrupt)} stopped the drill and its runs, which proves nothing. They are in {home}"
            )
            print(stopped, file=sys.stderr, flush=True)
        return ExitCode.INTERRUPTED
    text = json.dumps(as_json(report), indent=2) if options.json else "\n".join([table(report), *closing(report)])
    print(text)
    if options.remove and report.accepted:
        shutil.rmtree(drill.home)
    return ExitCode.FINISHED if report.accepted else ExitCode.FAILED


def table(report: Report) -> str:
    """Format the comparison, one row per compared quantity."""
    rows = [
        ("", "STRAIGHT", "INTERRUPTED", ""),
        ("attempts", "1", str(len(report.interruptions) + 1), ""),
        *((row.what, _cell(row.straight), _cell(row.interrupted), _result(row, report)) for row in report.rows),
    ]
    return "\n".join(aligned(rows))


def closing(report: Report) -> list[str]:
    """Return the lines after the table: the remarks, and the conclusion."""
    return [*report.notes, conclusion(report)]


def conclusion(report: Report) -> str:
    """Summarize the result, and name the folder of the runs."""
    home = f"The runs are in {os.path.relpath(report.straight.path.parent)}"
    if report.unproven:
        return f"nothing is proven: {report.unproven}. {home}"
    when = f"interrupted after {_moments(report)}"
    if report.exact:
        return f"exact: {when}, nothing differs. {home}"
    if report.accepted:
        worst = max((row for row in report.rows if not row.equal), key=lambda row: row.relative or 0.0)
        largest = f"the largest relative difference is {worst.relative:.2g} ({worst.what})"
        return f"equal within {report.tolerance:g}: {when}, {largest}. {home}"
    differing = ", ".join(row.what for row in report.rows if not row.is_within(report.tolerance))
    return f"not exact: {when}, and these differ: {differing}. {home}"


def as_json(report: Report) -> dict[str, Any]:
    """Return the report for `--json`."""
    return {
        "exact": report.exact,
        "accepted": report.accepted,
        "unproven": report.unproven,
        "straight": str(report.straight.path),
        "interrupted": str(report.interrupted.path),
        "interruptions": [asdict(one) for one in report.interruptions],
        "compared": [asdict(row) for row in report.rows],
        "notes": report.notes,
    }


def _repeat_advice(home: Path, options: argparse.Namespace) -> str:
    # it would be refused: the folder isn't empty
    is_named = any(word.lstrip("+").startswith("run_dir=") for word in options.overrides)
    first = f"remove {os.path.relpath(home)} and " if is_named else ""
    return f"once the cause is fixed, {first}repeat the drill with the command as typed"


def _moments(report: Report) -> str:
    steps = [one.step for one in report.interruptions if one.step is not None]
    if len(steps) == len(report.interruptions):
        return numbered("step", steps)
    return ", ".join(map(stopped_after, report.interruptions))


def _cell(text: str) -> str:
    return text if len(text) <= MAX_CELL_CHARS else f"{text[:12]}..."


def _result(row: Row, report: Report) -> str:
    if row.equal:
        return "equal"
    relative = "" if row.relative is None else f"relative {row.relative:.2g}"
    summary = f"within {report.tolerance:g}" if row.is_within(report.tolerance) else "DIFFERS"
    return ", ".join(filter(None, (summary, row.difference, relative)))


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text}")
    return int(text)
