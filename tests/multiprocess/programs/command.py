"""The command line, and what a launcher starts per rank, as functions."""

import runpy
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from hpctrain.cli import main
from hpctrain.config.stored import load
from hpctrain.rank import devices
from hpctrain.rank.entry import run_rank
from hpctrain.run.directory import RunDirectory
from hpctrain.train.workload import TrainingWorkload


def run(*words):
    return int(main(words))


def rank(path):
    directory = RunDirectory.at(Path(path))
    return int(run_rank(TrainingWorkload(load(directory.config), directory)))


def in_a_thread(*words):
    with ThreadPoolExecutor(1) as pool:
        return int(pool.submit(main, words).result())


def program(path, *words):
    sys.argv = [path, *words]
    runpy.run_path(path, run_name="__main__")


def rank_with_broken_driver(path):
    """As a rank on a machine whose driver shows a GPU that torch, built for it, can't use."""

    def init():
        raise RuntimeError("CUDA error: system not yet initialized\nCUDA kernel errors might be reported later")

    torch.cuda.init = init
    torch.backends.cuda.is_built = lambda: True
    devices.visible_gpus = lambda environ: 1
    return rank(path)
