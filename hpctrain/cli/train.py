"""Training: compose, check, and launch; or be a rank where something has launched one already."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import signal
import sys
import time
from collections.abc import Sequence

from hydra._internal.utils import get_args_parser

from hpctrain.cluster.environment import ClusterEnvironment, is_rank
from hpctrain.config.compose import PRIMARY, Composer, open_overrides
from hpctrain.errors import ConfigError, ExitCode, HpctrainError
from hpctrain.run.directory import RunDirectory
from hpctrain.status.report import require_stopped

EXPERIMENT = (
    "write what it changes into CONFIG_DIR/experiment/NAME.yaml, and add --config-dir CONFIG_DIR experiment=NAME"
)
REFUSED = {
    "config_name": ("another main configuration isn't taken", EXPERIMENT),
    "config_path": ("another folder in place of hpctrain's isn't taken", EXPERIMENT),
    "experimental_rerun": ("a pickle of Hydra's isn't taken", "python -m hpctrain resume RUN goes on with a run"),
}
"""Flags that Hydra's parser knows, and whose value nothing here would read: what is wrong, what to do instead."""
SPEAKING_S = 5.0
"""Seconds that the other ranks give rank zero to say what is wrong with the configuration."""


def main(arguments: Sequence[str]) -> int:
    """Train, sweep, or show the configuration, by Hydra's own flags.

    Returns:
        An `ExitCode`.
    """
    parser = _parser()
    options = parser.parse_args(list(arguments))
    for flag, (problem, remedy) in REFUSED.items():
        if (given := getattr(options, flag)) is not None:
            raise ConfigError(f"--{flag.replace('_', '-')}", given, problem, remedy)
    composer = Composer(options.config_dir)
    if _only_shows(options):
        return _show(composer, options, parser)
    if is_rank(os.environ):
        return _be_a_rank(composer, options.overrides)
    if options.multirun:
        from hpctrain.sweep.multirun import multirun

        return multirun(composer, options.overrides, _command(arguments))
    from hpctrain.launch.launcher import launch

    config = composer.compose(options.overrides)
    directory = None if config.run_dir is None or config.cluster.dry_run else RunDirectory.at(config.run_dir)
    if directory is not None and directory.config.is_file():
        require_stopped(directory)
    return launch(config, _command(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = get_args_parser()
    parser.prog = "python -m hpctrain"
    for action in parser._actions:
        if action.dest in REFUSED:
            action.help = argparse.SUPPRESS
    return parser


def _command(arguments: Sequence[str]) -> list[str]:
    return ["python", "-m", "hpctrain", *arguments]


def _only_shows(options: argparse.Namespace) -> bool:
    return bool(options.help or options.hydra_help or options.cfg or options.info or options.shell_completion)


def _show(composer: Composer, options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    hydra, overrides = composer.hydra, open_overrides(options.overrides)
    with composer.explaining(options.overrides):
        if options.help:
            _help(composer, options, parser)
        elif options.hydra_help:
            # Hydra lists the flags without asking whether their help is suppressed
            parser._actions = [action for action in parser._actions if action.dest not in REFUSED]
            hydra.hydra_help(config_name=PRIMARY, args_parser=parser, args=options)
        elif options.cfg:
            if options.cfg == "job":
                composer.compose(options.overrides)
            hydra.show_cfg(
                config_name=PRIMARY,
                overrides=overrides,
                cfg_type=options.cfg,
                package=options.package,
                resolve=options.resolve,
            )
        elif options.info:
            hydra.show_info(options.info, config_name=PRIMARY, overrides=overrides)
        else:
            hydra.shell_completion(config_name=PRIMARY, overrides=overrides)
    return ExitCode.FINISHED


def _help(composer: Composer, options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        composer.hydra.app_help(config_name=PRIMARY, args_parser=parser, args=options)
    # the schemas stand among the options, but are nobody's choice
    print(re.sub(r"(, )?\bbase_\w+\b(?(1)|,? ?)", "", text.getvalue()), end="")


def _let_rank_zero_speak(code: ExitCode) -> None:
    """Wait for rank zero, which says what is wrong for all: torchrun and srun end it when another rank ends first."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
    time.sleep(SPEAKING_S)


def _be_a_rank(composer: Composer, overrides: list[str]) -> int:
    from hpctrain.launch.prepare import prepare_as_rank
    from hpctrain.worker.entry import end_process, run_rank

    environment = ClusterEnvironment.from_environment(os.environ)
    try:
        config = composer.compose(overrides, world_size=environment.world_size)
    except ConfigError as error:
        if environment.rank:
            _let_rank_zero_speak(error.exit_code)
            return error.exit_code
        raise
    code: int
    try:
        code = run_rank(config, None, lambda: prepare_as_rank(config, sys.argv, environment).directory)
    except HpctrainError as error:
        print(f"hpctrain: error: {error}", file=sys.stderr)
        code = error.exit_code
    end_process(code)
    return code
