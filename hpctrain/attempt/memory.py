"""Attempts that the kernel ended for their memory: what they had, and the keys that give them more or need less."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

from hpctrain.attempt.outcome import Outcome
from hpctrain.config.cluster import Slurm
from hpctrain.config.root import Config
from hpctrain.run.reason import Reason

VMSTAT = Path("/proc/vmstat")


def with_memory(outcome: Outcome, config: Config) -> Outcome:
    """Begin the report of an out-of-memory kill with what the attempt had, and what to change."""
    if outcome.reason is not Reason.OUT_OF_MEMORY:
        return outcome
    return replace(outcome, report=f"killed for memory; {_remedy(config)}: {outcome.report}")


def oom_kills(vmstat: Path = VMSTAT) -> int:
    """Processes that this machine's kernel has killed for lack of memory since it started, in control groups too."""
    with contextlib.suppress(OSError, ValueError):
        for line in vmstat.read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0


def _remedy(config: Config) -> str:
    """What the attempt had, if hpctrain requested it, and what can still be changed."""
    fewer = ["fewer data.num_workers"] if config.data.num_workers != 0 else []
    smaller = ["a smaller trainer.micro_batch_size"] if config.trainer.micro_batch_size != 1 else []
    less = f"use {' or '.join([*fewer, *smaller, 'a smaller model'][:2])}"
    if not isinstance(config.cluster, Slurm):
        return less
    if config.cluster.memory_gb is None:
        return f"cluster.memory_gb isn't set, so a node had SLURM's default: set it, or {less}"
    return f"cluster.memory_gb={config.cluster.memory_gb:g} was requested for each node: raise it, or {less}"
