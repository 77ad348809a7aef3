"""The parsers of the commands, and the arguments that several of them take."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from hpctrain.errors import ERROR_PREFIX, ExitCode
from hpctrain.phrases import with_paths
from hpctrain.run.directory import RunDirectory
from hpctrain.status.runs import run_of, runs_of


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Print the error, and exit with code 2."""
        self.exit(ExitCode.BAD_CONFIGURATION, f"{ERROR_PREFIX}{message}; see {self.prog} --help\n")


def number(low: float, high: float, kind: type[float] = float) -> Callable[[str], float]:
    """Make a converter for `add_argument(type=...)` that refuses NaN and numbers outside of [low, high]."""

    def convert(text: str) -> float:
        try:
            value = kind(text)
        except (ValueError, OverflowError):
            value = math.nan
        if not low <= value <= high:
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"expected {what} from {low:g} to {high:g}, got {text!r}")
        return value

    return convert


def command_parser(command: str, text: str | None) -> argparse.ArgumentParser:
    """Make the parser of `python -m hpctrain COMMAND`.

    Args:
        command: its name.
        text: the help, usually the docstring of the command's module: what it does, and after an empty line what stands
            below the options; pages are named as for `with_paths`. None with `python -OO`, which keeps no docstring.
    """
    description, _, epilog = with_paths(text or "python -OO keeps no help").partition("\n\n")
    return OneLineParser(
        prog=f"python -m hpctrain {command}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_runs(parser: argparse.ArgumentParser, *, nargs: str | int | None = None) -> None:
    """Add RUN, or several with ``nargs``, and `--runs-dir`, the folder in which their names are looked up."""
    help_text = "a run directory, or its path below --runs-dir"
    parser.add_argument("run", nargs=nargs, metavar="RUN", help=help_text)
    add_runs_dir(parser)


def add_runs_dir(parser: argparse.ArgumentParser) -> None:
    """Add `--runs-dir`, the folder in which the names of runs are looked up."""
    meaning = "the folder that contains the runs (default: runs)"
    parser.add_argument("--runs-dir", default="runs", metavar="FOLDER", help=meaning)


def chosen_run(options: argparse.Namespace) -> RunDirectory:
    """The one run that was named.

    Raises:
        RunDirectoryError: no run matches, or several do.
    """
    return run_of(options.run, Path(options.runs_dir))


def chosen_runs(options: argparse.Namespace) -> list[RunDirectory]:
    """The runs that were named, each once.

    Raises:
        RunDirectoryError: one of the names matches no run.
    """
    return list(dict.fromkeys(run for name in options.run for run in runs_of(name, Path(options.runs_dir))))


def typed_name(directory: Path, runs_dir: Path) -> str:
    """The name of a run as the commands take it: below the folder of the runs, or the path of one that isn't there."""
    name = os.path.relpath(directory, runs_dir)
    return os.path.relpath(directory) if name.startswith("..") else name


def add_overrides(parser: argparse.ArgumentParser, meaning: str) -> None:
    """Add overrides and `--config-dir`; parse with `parse_intermixed_args`, so that options may follow overrides."""
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=meaning)
    add_config_dir(parser)


def add_config_dir(parser: argparse.ArgumentParser) -> None:
    """Add `--config-dir`, a folder that is searched for groups and options before all others."""
    parser.add_argument("--config-dir", metavar="FOLDER", help="a folder with your own groups and options")
