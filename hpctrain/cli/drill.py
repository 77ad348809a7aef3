"""Prove that an interrupted training ends with the same weights as an uninterrupted one.

examples:
  python -m hpctrain drill
  python -m hpctrain drill task=text cluster.processes_per_node=2 --interruptions 5
  python -m hpctrain drill cluster=slurm nodes=2 trainer.max_steps=500
  python -m hpctrain drill run -- python train.py       # any program: see drill run --help

A short training runs once straight, and once with interruptions at random steps: on this machine by SIGTERM or SIGINT
to the launching process and `resume`, on SLURM by `scontrol requeue`. Then the digests of the weights, the samples of
every step, the losses and the evaluations are compared, to the last bit. On GPUs, trainer.deterministic=true is set.

The runs stay in runs/drill/DATE_TIME, or in run_dir, as `straight` and `interrupted`.

Exit code 0 if nothing differs; 1 if something does, a run failed, or no interruption took effect; 2 for overrides that
can't work; 4 if a signal or Ctrl-C stopped the drill, and its runs with it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from hpctrain.cli.arguments import add_overrides, command_parser, number
from hpctrain.cli.run import parse_words
from hpctrain.config.cluster import Slurm
from hpctrain.config.command import refuse_missing_script
from hpctrain.config.compose import Composer, ProgramComposer
from hpctrain.config.program import split_command
from hpctrain.config.resources import resources_of
from hpctrain.config.root import RunConfig
from hpctrain.drill import program_drill, training_drill
from hpctrain.drill.comparison import ComparisonRow
from hpctrain.drill.drill import Console, Drill, Report, stopped_after
from hpctrain.errors import ExitCode, RunDirectoryError, RunFailedError
from hpctrain.launch.prepare import claim_default_path
from hpctrain.phrases import aligned, counted, numbered
from hpctrain.run.directory import RunDirectory
from hpctrain.run.process import handlers_restored
from hpctrain.streams import print_warning

MAX_CELL_CHARS = 28
"""The table cuts longer cells, such as digests."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""Signals that would end Python without an exception: of `timeout`, of a shutdown, and of a closed terminal."""


def main(arguments: list[str]) -> int:
    """Run a drill; ``arguments`` are those after `drill`."""
    if arguments[:1] == ["run"]:
        return _drill_program(arguments[1:])
    parser = command_parser("drill", __doc__)
    add_overrides(parser, "what to train, and where; as for a run")
    add_drill_options(parser)
    options = parser.parse_intermixed_args(arguments)
    strays = [word for word in options.overrides if "=" not in word and not word.startswith("~")]
    if strays or "--" in arguments:
        wrong = next(iter(strays), "--")
        parser.error(f"{wrong} is not KEY=VALUE; to drill a program, write {parser.prog} run -- COMMAND")
    composer = Composer(options.config_dir)
    composer.can_sweep = False
    config = composer.compose(training_drill.overrides_of(options.overrides))
    overrides = training_drill.overrides_of(options.overrides, gpus=resources_of(config).gpus_per_node != 0)
    make = partial(
        training_drill.TrainingDrill,
        config=composer.compose(overrides),
        overrides=overrides,
        user_overrides=options.overrides,
        config_dir=options.config_dir,
    )
    return _run(make, config, options)


_PROGRAM_HELP = """\
Prove that an interrupted program ends with the same tensors.

examples:
  python -m hpctrain drill run -- python train.py --steps 200
  python -m hpctrain drill run cluster.processes_per_node=2 --interruptions 5 -- python train.py
  python -m hpctrain drill run cluster=slurm nodes=2 --tolerance 1e-6 -- python train.py

The program runs once straight, and once with interruptions: on this machine by SIGTERM or SIGINT to the launching
process and `resume`, on SLURM by `scontrol requeue`. It is interrupted after random steps if it reports its steps
(hpctrain.session), otherwise at random times. Then the tensors in the last saves are compared to the last bit, and the
metrics that the program reported. The last save is the one that the program reported last; without reports, what the
straight run wrote last into HPCTRAIN_CHECKPOINT_DIR, and what has the same name in the other run.

The runs stay in runs/drill/DATE_TIME, or in run_dir, as `straight` and `interrupted`.

Exit code 0 if nothing differs, or nothing by more than --tolerance; 1 if something does, a run failed, or nothing is
proven; 2 for a configuration that can't work; 4 if a signal or Ctrl-C stopped the drill, and its runs with it."""


def _drill_program(arguments: list[str]) -> int:
    """Run a drill of a program; ``arguments`` are those after `drill run`."""
    words, command = split_command(arguments)
    parser = command_parser("drill run", _PROGRAM_HELP)
    parser.usage = "python -m hpctrain drill run [-h] [options] [KEY=VALUE ...] -- COMMAND ..."
    add_overrides(parser, "where and how to run it, as for `python -m hpctrain run`")
    add_drill_options(parser)
    parser.add_argument(
        "--tolerance",
        type=number(0.0, math.inf),
        default=0.0,
        metavar="X",
        help="accept relative differences up to X: of a metric's values, and of a tensor's elements relative to its "
        "largest one (default: 0)",
    )
    meaning = "metrics and tensors that may differ, such as 'time/*'; may be repeated"
    parser.add_argument("--ignore", action="append", default=[], metavar="PATTERN", help=meaning)
    options = parse_words(parser, words, command if "--" in arguments else None)
    refuse_missing_script(command, print_warning)
    composer = ProgramComposer(command, options.config_dir)
    composer.can_sweep = False
    config = composer.compose_run(program_drill.overrides_of(options.overrides))
    overrides = program_drill.overrides_of(options.overrides, config)
    composer.compose_run(overrides)
    make = partial(
        program_drill.ProgramDrill,
        overrides=overrides,
        config_dir=options.config_dir,
        command=command,
        tolerance=options.tolerance,
        ignored=options.ignore,
    )
    return _run(make, config, options)


def add_drill_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of every drill."""
    at_least_one = number(1, 1e9, int)
    meaning = "how often to interrupt (default: 3)"
    parser.add_argument("--interruptions", type=at_least_one, default=3, metavar="N", help=meaning)
    meaning = "seed of the random moments and signals (default: 0)"
    parser.add_argument("--seed", type=int, default=0, metavar="N", help=meaning)
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


def _run(make: Callable[..., Drill], config: RunConfig, options: argparse.Namespace) -> int:
    """Run a drill, and print its result; return the exit code.

    Args:
        make: makes the drill from what all drills have in common.
        config: of its runs.
        options: of the command.

    Raises:
        RunFailedError: one of its runs failed, or their results can't be compared.
    """
    home = drill_home(config)
    console = Console(sys.stderr if options.json else sys.stdout)
    ranks = counted(resources_of(config).world_size, "rank")
    on_slurm = isinstance(config.cluster, Slurm)
    where = "SLURM" if on_slurm else "this machine"
    console.report(f"drill of {config.name} with {ranks} on {where}, in {os.path.relpath(home)}")
    drill = make(home=home, on_slurm=on_slurm, interruptions=options.interruptions, seed=options.seed, console=console)
    try:
        with stop_signals_raised():
            report = drill.run()
    except RunFailedError as error:
        raise RunFailedError(f"{error}\n{_repeat_advice(home, options)}") from error
    except KeyboardInterrupt as interrupt:
        name = str(interrupt) or "Ctrl-C"
        text = f"{name} stopped the drill and its runs, which proves nothing. They are in {os.path.relpath(home)}"
        with contextlib.suppress(OSError):  # the terminal was closed
            print(text, file=sys.stderr, flush=True)
        return ExitCode.INTERRUPTED
    text = json.dumps(as_json(report), indent=2) if options.json else "\n".join([table(report), *closing(report)])
    print(text)
    if options.remove and report.accepted:
        shutil.rmtree(home)
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
        "interruptions": [asdict(interruption) for interruption in report.interruptions],
        "compared": [asdict(row) for row in report.rows],
        "notes": report.notes,
    }


def _repeat_advice(home: Path, options: argparse.Namespace) -> str:
    # it would be refused: the folder isn't empty
    is_named = any(word.lstrip("+").startswith("run_dir=") for word in options.overrides)
    first = f"remove {os.path.relpath(home)} and " if is_named else ""
    return f"once the cause is fixed, {first}repeat the drill with the command as typed"


def _moments(report: Report) -> str:
    steps = [interruption.step for interruption in report.interruptions if interruption.step is not None]
    if len(steps) == len(report.interruptions):
        return numbered("step", steps)
    return ", ".join(map(stopped_after, report.interruptions))


def _cell(text: str) -> str:
    return text if len(text) <= MAX_CELL_CHARS else f"{text[:12]}..."


def _result(row: ComparisonRow, report: Report) -> str:
    if row.equal:
        return "equal"
    relative = "" if row.relative is None else f"relative {row.relative:.2g}"
    summary = f"within {report.tolerance:g}" if row.is_within(report.tolerance) else "DIFFERS"
    return ", ".join(filter(None, (summary, row.difference, relative)))


@contextmanager
def stop_signals_raised() -> Iterator[None]:
    """Context manager in which the first SIGTERM or SIGHUP raises a KeyboardInterrupt; in the main thread alone."""
    is_stopping = False

    def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - Python's signature
        nonlocal is_stopping
        # `timeout` sends its signal twice, to the process and to its group
        if not is_stopping:
            is_stopping = True
            raise KeyboardInterrupt(signal.Signals(number).name)

    with handlers_restored(STOP_SIGNALS):
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, stop)
        yield
