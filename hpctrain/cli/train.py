"""Train: compose, check and launch a run or a sweep; in a process that a launcher started, train as a rank."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Sequence

from hydra.core.hydra_config import HydraConfig
from omegaconf import Container, DictConfig, OmegaConf

from hpctrain.cli.arguments import OneLineParser
from hpctrain.cluster.environment import ClusterEnvironment, is_rank
from hpctrain.config.compose import PRIMARY, Composer, SweepComposer, split_sweep
from hpctrain.config.overrides import open_overrides, quoted
from hpctrain.config.program import split_command
from hpctrain.config.root import SWEEP_GROUP
from hpctrain.config.sweep import kind_of
from hpctrain.errors import ERROR_PREFIX, ConfigError, ExitCode, HpctrainError
from hpctrain.startup import __version__, with_working_directory
from hpctrain.streams import ignore_write_errors

EXPERIMENT = "write what it changes into conf/experiment/NAME.yaml, and add experiment=NAME"
INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
"""What Hydra's `--info` shows."""
REFUSED = {
    ("--config-name", "-cn"): ("another main configuration isn't supported", EXPERIMENT),
    ("--config-path", "-cp"): ("another folder in place of hpctrain's isn't supported", EXPERIMENT),
    ("--experimental-rerun",): ("Hydra's pickles aren't supported", "python -m hpctrain resume RUN continues a run"),
}
"""Flags of Hydra applications that hpctrain doesn't have: why, and what to do instead."""
RANK_ZERO_S = 5.0
"""Seconds that the other ranks wait for rank zero to report what is wrong with the configuration."""


def main(arguments: Sequence[str]) -> int:
    """Train, sweep, or show the configuration; ``arguments`` are overrides and Hydra's flags."""
    if "--" in arguments:
        command = shlex.join(split_command(arguments)[1])
        remedy = f"write python -m hpctrain run {shlex.join(arguments)}"
        raise ConfigError("run.command", command, "only the command run launches a program", remedy)
    parser = _parser()
    for names in REFUSED:
        parser.add_argument(*names, help=argparse.SUPPRESS)
    _refuse_dashes(arguments, parser)
    # flags may stand anywhere: `cluster=slurm -m seed=1,2`
    options = parser.parse_intermixed_args(list(arguments))
    for (name, *_), (problem, remedy) in REFUSED.items():
        if (flag_value := getattr(options, name.removeprefix("--").replace("-", "_"))) is not None:
            raise ConfigError(name, flag_value, problem, remedy)
    if options.help or options.hydra_help or options.cfg or options.info or options.shell_completion:
        return _show(Composer(options.config_dir), options)
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
    """Make the parser of Hydra's flags; their help is for `--hydra-help`."""
    parser = OneLineParser(prog="python -m hpctrain", add_help=False)
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE or GROUP=OPTION")
    parser.add_argument("--help", "-h", action="store_true", help="hpctrain's help")
    parser.add_argument("--hydra-help", action="store_true", help="Hydra's help")
    parser.add_argument("--cfg", "-c", choices=["job", "hydra", "all"], help="show the configuration")
    parser.add_argument("--resolve", action="store_true", help="with --cfg: resolve interpolations")
    parser.add_argument("--package", "-p", help="with --cfg: the group to show")
    parser.add_argument("--info", "-i", const="all", nargs="?", choices=INFO, help=f"show Hydra's {'|'.join(INFO)}")
    parser.add_argument("--run", "-r", action="store_true", help="run once, which is the default")
    parser.add_argument("--multirun", "-m", action="store_true", help="run for each of several values")
    parser.add_argument("--config-dir", "-cd", help="a folder that is searched for groups and options first")
    parser.add_argument("--shell-completion", "-sc", action="store_true", help="Hydra's completion for a shell")
    parser.add_argument("--version", action="version", version=__version__, help="hpctrain's version")
    return parser


def _refuse_dashes(arguments: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Refuse `--KEY=VALUE`, also where argparse would take it for the beginning of a flag that isn't supported."""
    exact = {flag for action in parser._actions for flag in action.option_strings}
    flags = exact.difference(*REFUSED)
    for word in arguments:
        name, is_given, value = word.partition("=")
        if not (name.startswith("--") and is_given) or name in exact or any(flag.startswith(name) for flag in flags):
            continue
        key = name.removeprefix("--")
        raise ConfigError(name, value, "is not a flag, and keys have no dashes", f"write {key}={value}")


def _command(arguments: Sequence[str]) -> list[str]:
    return ["python", "-m", "hpctrain", *arguments]


def _show(composer: Composer, options: argparse.Namespace) -> int:
    sweep, words = split_sweep(options.overrides) if options.cfg and options.multirun else ([], options.overrides)
    application, overrides = composer.application, list(map(quoted, open_overrides(words)))
    with composer.explaining(words):
        if options.help:
            from hpctrain.cli.help import help_text

            print(help_text(composer, options.overrides, options.config_dir), end="")
        elif options.hydra_help:
            application.call("--hydra-help", "hydra_help", config_name=PRIMARY, args_parser=_parser(), args=options)
        elif options.cfg:
            if options.cfg == "job":
                composer.compose(words)
            _print_configuration(composer, overrides, options)
            if sweep:
                search = SweepComposer(options.config_dir).compose_sweep(sweep)
                print(f"# of the command, and of no run: sweep={kind_of(search)}")
                print(OmegaConf.to_yaml({SWEEP_GROUP: OmegaConf.structured(search)}), end="")
        elif options.info:
            application.call("--info", "show_info", info=options.info, config_name=PRIMARY, overrides=overrides)
        else:
            if not re.fullmatch(r"(un)?install=\w+", " ".join(options.overrides)):
                problem = "expected install=SHELL or uninstall=SHELL"
                remedy = "write --shell-completion install=bash; hpctrain's own is python -m hpctrain completion bash"
                raise ConfigError("--shell-completion", " ".join(options.overrides), problem, remedy)
            application.call("--shell-completion", "shell_completion", config_name=PRIMARY, overrides=overrides)
    return ExitCode.FINISHED


def _print_configuration(composer: Composer, overrides: list[str], options: argparse.Namespace) -> None:
    """Print what Hydra composes, as applications of Hydra do with `--cfg`."""
    node = composer.compose_with_hydra(overrides)
    HydraConfig.instance().set_config(node)  # for interpolations such as ${hydra:runtime.cwd}
    OmegaConf.set_struct(node, False)
    OmegaConf.set_struct(node.hydra, False)
    OmegaConf.set_readonly(node.hydra, False)
    if options.cfg == "job":
        del node["hydra"]
    elif options.cfg == "hydra":
        for key in set(node) - {"hydra"}:
            del node[key]
        del node.hydra["hydra_help"], node.hydra["help"]
    name = None if options.package == "_global_" else options.package
    group, _, key = (name or "").rpartition(".")
    parent = OmegaConf.select(node, group) if group else node
    if name is not None and not (isinstance(parent, DictConfig) and key in parent):
        raise ConfigError("--package", name, "is not in the configuration", "name a group, such as trainer")
    part = node if name is None else OmegaConf.select(node, name)
    if not isinstance(part, Container):
        print("null" if part is None else part)
        return
    if options.resolve:
        OmegaConf.resolve(part)
    print(f"# @package {name}\n" if name else "", OmegaConf.to_yaml(part), sep="", end="")


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
