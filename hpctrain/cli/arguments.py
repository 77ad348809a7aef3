"""The parsers of the commands, and the arguments that several of them take."""

from __future__ import annotations

import argparse

RUN_HELP = "a run directory, or its name under the folder of runs"


def command_parser(command: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """Make the parser of `python -m hpctrain COMMAND`, whose help ends with ``epilog`` as it is."""
    return argparse.ArgumentParser(
        prog=f"python -m hpctrain {command}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_runs_dir(parser: argparse.ArgumentParser) -> None:
    """Add the folder in which names of runs are looked up."""
    parser.add_argument("--runs-dir", default="runs", metavar="FOLDER", help="the folder of runs (default: runs)")


def add_overrides(parser: argparse.ArgumentParser, meaning: str) -> None:
    """Add the words of a configuration; such a parser is used by `parse_intermixed_args`."""
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=meaning)
    parser.add_argument("--config-dir", metavar="FOLDER", help="a folder with groups and options of your own")
