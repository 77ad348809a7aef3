"""`python -m hpctrain drill [KEY=VALUE ...]`: prove on this machine, or cluster, that interruptions change nothing."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpctrain.cli.drill_text import Console, table, verdict
from hpctrain.config.cluster import Slurm
from hpctrain.config.compose import Composer
from hpctrain.config.resources import resources_of
from hpctrain.drill.drill import Drill, Report, overrides_of
from hpctrain.errors import ExitCode, RunDirectoryError
from hpctrain.launch.prepare import claim_default_path

_EPILOG = """\
examples:
  python -m hpctrain drill
  python -m hpctrain drill task=text cluster.processes_per_node=2 --interruptions 5
  python -m hpctrain drill cluster=slurm nodes=2 trainer.max_steps=500

A short training runs straight, and again with interruptions at random steps: here by SIGTERM or SIGINT to the
launching process and `resume`, on SLURM by `scontrol requeue`. Then the digests of the weights, the samples that every
step took, the losses and the evaluations are compared, to the last bit. On GPUs it sets trainer.deterministic=true.

The runs stay in runs/drill/DATE_TIME, or in run_dir, as `straight` and `interrupted`.

Exit code 0 where nothing differs; 1 where something does, a run failed, or no interruption took effect; 2 for overrides
that can't work."""


def main(arguments: list[str]) -> int:
    """Do a drill; `arguments` are those after the word `drill`."""
    parser = argparse.ArgumentParser(
        prog="python -m hpctrain drill",
        description="Prove that an interrupted training ends with the same weights as a straight one.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="what to train, and where; as for a run")
    parser.add_argument("--interruptions", type=_count, default=3, metavar="N", help="how many (3)")
    parser.add_argument("--seed", type=int, default=0, help="of the steps and signals (0)")
    parser.add_argument("--config-dir", help="a folder with more configuration")
    parser.add_argument("--remove", action="store_true", help="remove both runs if nothing differs")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    options = parser.parse_intermixed_args(arguments)
    composer = Composer(options.config_dir)
    config = composer.compose(overrides_of(options.overrides))
    gpus = resources_of(config).gpus_per_node > 0
    typed = overrides_of(options.overrides, gpus=gpus)
    if gpus:
        config = composer.compose(typed)
    home = _home(config.run_dir)
    console = Console(sys.stderr if options.json else sys.stdout)
    where = "SLURM" if isinstance(config.cluster, Slurm) else "this machine"
    ranks = resources_of(config).world_size
    console.say(f"drill of {config.name} with {ranks} rank{'s' * (ranks > 1)} on {where}, in {os.path.relpath(home)}")
    drill = Drill(
        config=config,
        overrides=typed,
        typed=options.overrides,
        config_dir=options.config_dir,
        home=home,
        interruptions=options.interruptions,
        seed=options.seed,
        progress=console,
    )
    report = drill.run()
    print(json.dumps(_as_json(report), indent=2) if options.json else f"{table(report)}\n{verdict(report)}")
    if options.remove and report.exact:
        shutil.rmtree(home)
    return ExitCode.FINISHED if report.exact else ExitCode.FAILED


def _home(run_dir: str | None) -> Path:
    if run_dir is None:
        return claim_default_path("drill").absolute()
    home = Path(run_dir).absolute()
    if home.is_dir() and any(home.iterdir()):
        raise RunDirectoryError(f"run_dir={run_dir}: the folder isn't empty; name a new one for the drill")
    home.mkdir(parents=True, exist_ok=True)
    return home


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
        raise argparse.ArgumentTypeError(f"expected a number from 1 on, found {text}")
    return int(text)
