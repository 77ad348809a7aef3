"""Train: compose, check and launch a run or a sweep; in a process that a launcher started, train as a rank."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence

from hydra._internal.utils import get_args_parser
from omegaconf import OmegaConf

from hpctrain.cli.arguments import OneLineParser
from hpctrain.cluster.environment import ClusterEnvironment, is_rank
from hpctrain.config.compose import PRIMARY, Composer, SweepComposer, split_sweep
from hpctrain.config.overrides import open_overrides, quoted
from hpctrain.config.program import split_command
from hpctrain.config.root import SWEEP_GROUP
from hpctrain.config.sweep import kind_of
from hpctrain.errors import ERROR_PREFIX, ConfigError, ExitCode, HpctrainError
from hpctrain.startup import with_working_directory
from hpctrain.streams import ignore_write_errors

EXPERIMENT = "write what it changes into conf/experiment/NAME.yaml, and add experiment=NAME"
REFUSED = {
    "config_name": ("another main configuration isn't supported", EXPERIMENT),
    "config_path": ("another folder in place of hpctrain's isn't supported", EXPERIMENT),
    "experimental_rerun": ("Hydra's pickles aren't supported", "python -m hpctrain resume RUN continues a run"),
}
"""Flags of Hydra's parser that hpctrain would ignore: why they are refused, and what to do instead."""
RANK_ZERO_S = 5.0
"""Seconds that the other ranks wait for rank zero to report what is wrong with the configuration."""


def main(arguments: Sequence[str]) -> int:
    """Train, sweep, or show the configuration; ``arguments`` are overrides and Hydra's flags."""
    if "--" in arguments:
        command = shlex.join(split_command(arguments)[1])
        remedy = f"write python -m hpctrain run {shlex.join(arguments)}"
        raise ConfigError("run.command", command, "only the command run launches a program", remedy)
    parser = _parser()
    _refuse_dashes(arguments, parser)
    # flags may stand anywhere: `cluster=slurm -m seed=1,2`
    options = parser.parse_intermixed_args(list(arguments))
    for flag, (problem, remedy) in REFUSED.items():
        if (flag_value := getattr(options, flag)) is not None:
            raise ConfigError(f"--{flag.replace('_', '-')}", flag_value, problem, remedy)
    if options.help or options.hydra_help or options.cfg or options.info or options.shell_completion:
        return _show(Composer(options.config_dir), options, parser)
    composer = Composer(options.config_dir)
    # `srun python -m hpctrain ...` and torchrun start ranks: launching from one would start a job within the job
    if is_rank(os.environ):
        return _run_as_rank(composer, options.overrides)
    if options.multirun:
        from hpctrain.search.multirun import multirun

        return multirun(composer, options.overrides, _command(arguments))
    from hpctrain.launch.launcher import launch

    return launch(composer.compose(options.overrides), _command(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = get_args_parser()
    parser.prog = "python -m hpctrain"
    parser.__class__ = OneLineParser  # Hydra makes it, and offers no other way
    # argparse has no public way to change an argument of an existing parser
    for action in parser._actions:
        if action.dest in REFUSED:
            action.help = argparse.SUPPRESS
    return parser


def _refuse_dashes(arguments: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Refuse `--KEY=VALUE`, also where argparse would take it for the beginning of a flag that isn't supported."""
    flags = [flag for action in parser._actions if action.dest not in REFUSED for flag in action.option_strings]
    exact = {flag for action in parser._actions for flag in action.option_strings}
    for word in arguments:
        name, is_given, value = word.partition("=")
        if not (name.startswith("--") and is_given) or name in exact or any(flag.startswith(name) for flag in flags):
            continue
        key = name.removeprefix("--")
        raise ConfigError(name, value, "is not a flag, and keys have no dashes", f"write {key}={value}")


def _command(arguments: Sequence[str]) -> list[str]:
    return ["python", "-m", "hpctrain", *arguments]


def _show(composer: Composer, options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    sweep, words = split_sweep(options.overrides) if options.cfg and options.multirun else ([], options.overrides)
    hydra, overrides = composer.hydra, list(map(quoted, open_overrides(words)))
    with composer.explaining(words):
        if options.help:
            from hpctrain.cli.help import help_text

            print(help_text(composer, options.overrides, options.config_dir), end="")
        elif options.hydra_help:
            # Hydra lists flags whose help is suppressed, too
            parser._actions = [action for action in parser._actions if action.dest not in REFUSED]
            hydra.hydra_help(config_name=PRIMARY, args_parser=parser, args=options)
        elif options.cfg:
            if options.cfg == "job":
                composer.compose(words)
            hydra.show_cfg(
                config_name=PRIMARY,
                overrides=overrides,
                cfg_type=options.cfg,
                package=options.package,
                resolve=options.resolve,
            )
            if sweep:
                search = SweepComposer(options.config_dir).compose_sweep(sweep)
                print(f"# of the command, and of no run: sweep={kind_of(search)}")
                print(OmegaConf.to_yaml({SWEEP_GROUP: OmegaConf.structured(search)}), end="")
        elif options.info:
            hydra.show_info(options.info, config_name=PRIMARY, overrides=overrides)
        else:
            hydra.shell_completion(config_name=PRIMARY, overrides=overrides)
    return ExitCode.FINISHED


def wait_for_rank_zero(code: ExitCode) -> None:
    """Wait until rank zero has reported the error for all ranks."""
    # if another rank ended first, torchrun and srun would end rank zero before it has reported the error
    signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
    time.sleep(RANK_ZERO_S)


def _run_as_rank(composer: Composer, overrides: list[str]) -> int:
    from hpctrain.launch.prepare import prepare_as_rank
    from hpctrain.rank.entry import end_process, run_rank
    from hpctrain.train.workload import TrainingWorkload

    environment = ClusterEnvironment.from_environment(os.environ)
    try:
        config = composer.compose(
            overrides, world_size=environment.world_size, local_world_size=environment.local_world_size
        )
    except ConfigError as error:
        if environment.rank:
            wait_for_rank_zero(error.exit_code)
            return error.exit_code
        raise
    ignore_write_errors()
    sys.path[:] = with_working_directory()
    training = TrainingWorkload(config, make_directory=lambda: prepare_as_rank(config, sys.argv, environment).directory)
    code: int
    try:
        code = run_rank(training)
    except HpctrainError as error:
        print(f"{ERROR_PREFIX}{error}", file=sys.stderr)
        code = error.exit_code
    return end_process(code)
