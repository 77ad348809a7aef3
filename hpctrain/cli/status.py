"""Show the runs under a folder, newest first, or one run in detail.

examples:
  python -m hpctrain status                                     # the 20 newest runs under runs/
  python -m hpctrain status runs/digits/2026-01-31_12-00-00     # one run: attempts, metrics, what to type next
  python -m hpctrain status sweep --json                        # every run under runs/sweep
  python -m hpctrain status --watch                             # again and again, until Ctrl-C

States: prepared queued held starting running interrupted paused completed failed cancelled unknown unreadable. A
prepared run has not been started. A held run is in SLURM's queue and doesn't start until `scontrol release`. An
interrupted run was stopped, or ended without an exit record; a paused one reached trainer.pause_at_step; `resume`
continues both. Without SLURM, or without its accounting, the states come from the run directories alone.

--json prints one object for one run, and a list for several, one per line; times are epoch seconds; a metric that was
NaN or infinite is null.

--watch draws the table anew on a terminal, and appends it to a pipe or a file. SLURM is asked at most
every 10 s, however small SECONDS is.

Exit code 0, also after Ctrl-C; 2 if RUN is not a run.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.cli.arguments import add_runs, chosen_runs, command_parser, number, typed_name
from hpctrain.cli.screen import WATCH_S, cut_to_width, show_repeatedly
from hpctrain.errors import ExitCode
from hpctrain.phrases import aligned, counted, duration
from hpctrain.run.ledger import Attempt
from hpctrain.run.manifest import varied_text
from hpctrain.status.jobs import Ask, JobQuery, query_jobs
from hpctrain.status.run_status import RunStatus, read_statuses
from hpctrain.status.runs import find_runs

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SHOWN = 20
"""Runs in the table without --all; the help above says it, too."""

_HEAD = ("RUN", "VARIED", "STATE", "STEP", "LOSS", "EVAL LOSS", "BEST", "ATTEMPTS", "JOB", "LAST", "")


def main(arguments: list[str]) -> int:
    """Show runs; ``arguments`` are those after `status`."""
    parser = command_parser("status", __doc__)
    add_runs(parser, nargs="*")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--all", action="store_true", help=f"show every run, not only the {SHOWN} newest")
    seconds = number(1, 86_400)
    help_text = f"show them again every SECONDS ({WATCH_S:g}), until Ctrl-C"
    parser.add_argument("--watch", nargs="?", type=seconds, const=WATCH_S, metavar="SECONDS", help=help_text)
    options = parser.parse_args(_with_seconds(arguments))
    if options.watch is None:
        _show(options, query_jobs)
        return ExitCode.FINISHED
    query = JobQuery()
    return show_repeatedly(lambda: _show(options, query.ask), options.watch)


def _with_seconds(arguments: Sequence[str]) -> list[str]:
    """Complete a `--watch` before the name of a run, which argparse would take for the seconds."""
    following = [*arguments, ""][1:]
    return [
        f"--watch={WATCH_S:g}" if word == "--watch" and not _is_number(after) else word
        for word, after in zip(arguments, following, strict=True)
    ]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _show(options: argparse.Namespace, ask: Ask) -> None:
    runs_dir = Path(options.runs_dir)
    runs = chosen_runs(options) if options.run else find_runs(runs_dir)
    visible_runs = runs if options.all or options.run else runs[:SHOWN]
    single = len(options.run) == 1 and len(visible_runs) == 1
    statuses = read_statuses(visible_runs, brief=not (single or options.json), ask=ask)
    if options.json:
        records = [_as_json(status) for status in statuses]
        # one run per line: an indented list of a thousand takes longer than all else
        lines = ",\n".join(json.dumps(record, allow_nan=False) for record in records)
        print(json.dumps(records[0], indent=2, allow_nan=False) if single else f"[{lines}]")
    elif single:
        from hpctrain.status.run_details import run_details  # with what it imports, half of the time of `status`

        print(run_details(statuses[0], time.time()))
    elif statuses:
        print(_table(statuses, runs_dir, time.time()))
        if len(visible_runs) < len(runs):
            print(f"{counted(len(runs) - len(visible_runs), 'older run')}: --all shows them")
    else:
        print(f"no runs under {runs_dir}/; `python -m hpctrain` starts one")


def _table(statuses: Sequence[RunStatus], runs_dir: Path, now: float) -> str:
    """One line per run, in the given order; the reason for its state comes last, cut to the terminal's width."""
    rows = [_HEAD, *(_row(status, runs_dir, now) for status in statuses)]
    if not any(status.varied for status in statuses):
        rows = [(row[0], *row[2:]) for row in rows]
    return "\n".join(cut_to_width(aligned(rows)))


def _row(status: RunStatus, runs_dir: Path, now: float) -> tuple[str, ...]:
    losses = (status.metrics.get(name) for name in ("train/loss", "eval/loss"))
    last = status.last_sign
    return (
        typed_name(status.path, runs_dir),
        varied_text(status.varied) or "-",
        status.state,
        _step(status),
        *("-" if loss is None else f"{loss:.4g}" for loss in losses),
        "-" if status.best is None else f"{status.best.name} {status.best.value:.4g}",
        str(len(status.attempts)),
        status.job_ids[-1] if status.job_ids else "-",
        "-" if last is None else f"{duration(now - last)} ago",
        status.note,
    )


def _step(status: RunStatus) -> str:
    if not status.knows_step:
        return "-"
    return str(status.step) if status.total_steps is None else f"{status.step}/{status.total_steps}"


def _as_json(status: RunStatus) -> dict[str, Any]:
    spent = status.account.spent
    record = fields_as_json(status)
    record["metrics"] = dict(sorted(record["metrics"].items()))
    record["attempts"] = [_attempt(attempt) for attempt in status.attempts]
    record["verdict"] = record.pop("bottleneck")  # the field's name is older than that of the attribute
    record["account"] |= {"ratio": spent.ratio, "wall_s": spent.total_s, "shares": plain(spent.shares)}
    return record


def _attempt(attempt: Attempt) -> dict[str, Any]:
    """Return an attempt for JSON: fields that only some attempts record are in ``extra``."""
    record = fields_as_json(attempt)
    # __annotations__ are the fields of Attempt itself: those of its bases are optional
    optional = {name: record.pop(name) for name in [*record] if name not in Attempt.__annotations__}
    recorded = {
        name: value for name, value in optional.items() if value is not None and value is not False and value != []
    }
    return {**record, "extra": recorded}


def fields_as_json(value: DataclassInstance) -> dict[str, Any]:
    """The fields of a record as JSON has them."""
    # not `asdict`, which copies each value, and takes ten times as long
    return {field.name: plain(getattr(value, field.name)) for field in fields(value)}


def plain(value: object) -> object:
    """A value as JSON has it: null for each NaN and infinity, an object for each record, texts for all else."""
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): plain(inside) for name, inside in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inside) for inside in value]
    return fields_as_json(value) if is_dataclass(value) and not isinstance(value, type) else str(value)
