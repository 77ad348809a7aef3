"""`python -m hpctrain drill [KEY=VALUE ...]`: prove that interruptions change nothing."""

from __future__ import annotations

from hpctrain.cli.arguments import add_overrides, command_parser
from hpctrain.cli.drill_report import add_drill_options, drill_console, drill_home, run_drill
from hpctrain.config.cluster import Slurm
from hpctrain.config.compose import Composer
from hpctrain.config.resources import resources_of
from hpctrain.drill.training_drill import TrainingDrill, overrides_of

_EPILOG = """\
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
can't work; 4 if a signal or Ctrl-C stopped the drill, and its runs with it."""


def main(arguments: list[str]) -> int:
    """Run a drill; ``arguments`` are those after `drill`."""
    if arguments[:1] == ["run"]:
        from hpctrain.cli import drill_program

        return drill_program.main(arguments[1:])
    description = "Prove that an interrupted training ends with the same weights as an uninterrupted one."
    parser = command_parser("drill", description, _EPILOG)
    add_overrides(parser, "what to train, and where; as for a run")
    add_drill_options(parser)
    options = parser.parse_intermixed_args(arguments)
    strays = [word for word in options.overrides if "=" not in word and not word.startswith("~")]
    if strays or "--" in arguments:
        wrong = next(iter(strays), "--")
        parser.error(f"{wrong} is not KEY=VALUE; to drill a program, write {parser.prog} run -- COMMAND")
    composer = Composer(options.config_dir)
    composer.sweeps = False
    config = composer.compose(overrides_of(options.overrides))
    overrides = overrides_of(options.overrides, gpus=resources_of(config).gpus_per_node != 0)
    home = drill_home(config)
    drill = TrainingDrill(
        home=home,
        on_slurm=isinstance(config.cluster, Slurm),
        interruptions=options.interruptions,
        seed=options.seed,
        console=drill_console(options, config, home),
        config=composer.compose(overrides),
        overrides=overrides,
        typed=options.overrides,
        config_dir=options.config_dir,
    )
    return run_drill(drill, options)
