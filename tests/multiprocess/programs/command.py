"""The command line, and what a launcher starts per rank, as functions."""

from pathlib import Path

from hpctrain.cli import main
from hpctrain.config.stored import load
from hpctrain.run.directory import RunDirectory
from hpctrain.worker.entry import run_rank


def run(*words):
    return int(main(words))


def rank(path):
    directory = RunDirectory.at(Path(path))
    return int(run_rank(load(directory.config), directory))
