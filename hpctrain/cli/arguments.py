"""The parsers of the commands, and the arguments that several of them take."""

from __future__ import annotations

import argparse

RUN_HELP = "a run directory, or its name under the folder of runs"


def command_parser(command: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """Make the parser of `python -m hpctrain COMMAND`, whose help ends with ``epilog``, unwrapped."""
    return argparse.ArgumentParser(
        prog=f"python -m hpctrain {command}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_runs_dir(parser: argparse.ArgumentParser) -> None:
    """Add `--runs-dir`, the folder in which run names are looked up."""
    parser.add_argument("--runs-dir", default="runs", metavar="FOLDER", help="the folder of runs (default: runs)")


def add_overrides(parser: argparse.ArgumentParser, meaning: str) -> None:
    """Add overrides and `--config-dir`; parse with `parse_intermixed_args`, so that options may follow overrides."""
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=meaning)
    parser.add_argument("--config-dir", metavar="FOLDER", help="a folder with your own groups and options")
