"""`python -m hpctrain drill run [KEY=VALUE ...] -- COMMAND ...`: prove that a program survives interruptions."""

from __future__ import annotations

import math

from hpctrain.cli.arguments import add_overrides, command_parser, number
from hpctrain.cli.drill_report import add_drill_options, drill_console, drill_home, run_drill
from hpctrain.cli.run import parse_words
from hpctrain.config.cluster import Slurm
from hpctrain.config.compose_program import ProgramComposer
from hpctrain.config.program import split_command
from hpctrain.config.scripts import refuse_missing_script
from hpctrain.drill.program_drill import ProgramDrill, overrides_of
from hpctrain.streams import print_warning

_EPILOG = """\
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


def main(arguments: list[str]) -> int:
    """Run a drill of a program; ``arguments`` are those after `drill run`."""
    words, command = split_command(arguments)
    parser = command_parser("drill run", "Prove that an interrupted program ends with the same tensors.", _EPILOG)
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
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="PATTERN",
        help="metrics and tensors that may differ, such as 'time/*'; may be repeated",
    )
    options = parse_words(parser, words, command if "--" in arguments else None)
    refuse_missing_script(command, print_warning)
    composer = ProgramComposer(command, options.config_dir)
    composer.sweeps = False
    config = composer.compose_program(overrides_of(options.overrides))
    overrides = overrides_of(options.overrides, config)
    composer.compose_program(overrides)
    home = drill_home(config)
    drill = ProgramDrill(
        home=home,
        on_slurm=isinstance(config.cluster, Slurm),
        interruptions=options.interruptions,
        seed=options.seed,
        console=drill_console(options, config, home),
        overrides=overrides,
        config_dir=options.config_dir,
        command=command,
        tolerance=options.tolerance,
        ignored=options.ignore,
    )
    return run_drill(drill, options)
