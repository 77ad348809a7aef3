"""`python -m hpctrain drill [KEY=VALUE ...]`: prove that interruptions change nothing."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpctrain.cli.arguments import add_overrides, command_parser
from hpctrain.cli.table import aligned
from hpctrain.config.cluster import Slurm
from hpctrain.config.compose import Composer
from hpctrain.config.resources import resources_of
from hpctrain.config.root import Config
from hpctrain.drill.comparison import Row
from hpctrain.drill.console import Console
from hpctrain.drill.drill import Drill, Report, overrides_of
from hpctrain.errors import ExitCode, RunDirectoryError
from hpctrain.launch.run_dir import claim_default_path
from hpctrain.phrases import counted, numbered
from hpctrain.run.directory import RunDirectory

MAX_CELL_CHARS = 28
"""The table cuts longer cells, such as digests."""

_EPILOG = """\
examples:
  python -m hpctrain drill
  python -m hpctrain drill task=text cluster.processes_per_node=2 --interruptions 5
  python -m hpctrain drill cluster=slurm nodes=2 trainer.max_steps=500

A short training runs once straight, and once with interruptions at random steps: on this machine by SIGTERM or SIGINT
to the launching process and `resume`, on SLURM by `scontrol requeue`. Then the digests of the weights, the samples of
every step, the losses and the evaluations are compared, to the last bit. On GPUs, trainer.deterministic=true is set.

The runs stay in runs/drill/DATE_TIME, or in run_dir, as `straight` and `interrupted`.

Exit code 0 if nothing differs; 1 if something does, a run failed, or no interruption took effect; 2 for overrides that
can't work."""


def main(arguments: list[str]) -> int:
    """Run a drill; ``arguments`` are those after `drill`."""
    description = "Prove that an interrupted training ends with the same weights as an uninterrupted one."
    parser = command_parser("drill", description, _EPILOG)
    add_overrides(parser, "what to train, and where; as for a run")
    parser.add_argument(
        "--interruptions", type=_count, default=3, metavar="N", help="how often to interrupt (default: 3)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the random steps and signals (default: 0)"
    )
    parser.add_argument("--remove", action="store_true", help="remove both runs if nothing differs")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    options = parser.parse_intermixed_args(arguments)
    composer = Composer(options.config_dir)
    config = composer.compose(overrides_of(options.overrides))
    resources = resources_of(config)
    overrides = overrides_of(options.overrides, gpus=resources.gpus_per_node > 0)
    home = _home(config)
    console = Console(sys.stderr if options.json else sys.stdout)
    ranks = counted(resources.world_size, "rank")
    where = "SLURM" if isinstance(config.cluster, Slurm) else "this machine"
    console.report(f"drill of {config.name} with {ranks} on {where}, in {os.path.relpath(home)}")
    drill = Drill(
        config=composer.compose(overrides),
        overrides=overrides,
        typed=options.overrides,
        config_dir=options.config_dir,
        home=home,
        interruptions=options.interruptions,
        seed=options.seed,
        console=console,
    )
    report = drill.run()
    print(json.dumps(_as_json(report), indent=2) if options.json else f"{table(report)}\n{conclusion(report)}")
    if options.remove and report.exact:
        shutil.rmtree(home)
    return ExitCode.FINISHED if report.exact else ExitCode.FAILED


def table(report: Report) -> str:
    """Format the comparison, one row per compared quantity."""
    rows = [
        ("", "STRAIGHT", "INTERRUPTED", ""),
        ("attempts", "1", str(len(report.interruptions) + 1), ""),
        *((row.what, _cell(row.straight), _cell(row.interrupted), _result(row)) for row in report.rows),
    ]
    return "\n".join(aligned(rows))


def conclusion(report: Report) -> str:
    """Summarize the result, and name the folder of the runs."""
    home = os.path.relpath(report.straight.path.parent)
    when = f"interrupted after {numbered('step', [one.step for one in report.interruptions])}"
    if not report.interruptions:
        return (
            "nothing is proven: no interruption took effect before the run ended; "
            f"train for longer with trainer.max_steps. The runs are in {home}"
        )
    if report.exact:
        return f"exact: {when}, nothing differs. The runs are in {home}"
    differing = ", ".join(row.what for row in report.rows if not row.equal)
    return f"not exact: {when}, and these differ: {differing}. The runs are in {home}"


def _cell(text: str) -> str:
    return text if len(text) <= MAX_CELL_CHARS else f"{text[:12]}..."


def _result(row: Row) -> str:
    return "equal" if row.equal else ", ".join(filter(None, ("DIFFERS", row.difference)))


def _home(config: Config) -> Path:
    home = RunDirectory.at(config.run_dir or claim_default_path("drill"))
    if home.path.is_dir() and any(home.path.iterdir()):
        raise RunDirectoryError(f"run_dir={config.run_dir}: the folder isn't empty; name a new one for the drill")
    home.create_for_sweep(config.mode)
    return home.path


def _as_json(report: Report) -> dict[str, Any]:
    return {
        "exact": report.exact,
        "straight": str(report.straight.path),
        "interrupted": str(report.interrupted.path),
        "interruptions": [asdict(one) for one in report.interruptions],
        "compared": [asdict(row) for row in report.rows],
    }


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text}")
    return int(text)
