"""A rank that keeps its shards in host memory as on a GPU: on a CPU that changes no number, but takes the same code."""

from __future__ import annotations

from hpctrain.config import checks
from tests.multiprocess.programs import command

WITHOUT_GPU = tuple(entry for entry in checks.NEEDS_GPU if entry[0] != "parallel.cpu_offload")


def rank(path):
    checks.NEEDS_GPU = WITHOUT_GPU
    return command.rank(path)
