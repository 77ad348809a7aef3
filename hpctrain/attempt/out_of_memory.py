"""Out-of-memory kills: detect them, and name the keys that request more memory or use less."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hpctrain.attempt.outcome import LOST_WORKER, Outcome
from hpctrain.config.cluster import Slurm
from hpctrain.config.root import Config
from hpctrain.run.exit_record import ExitRecord
from hpctrain.run.process import memory_cgroups
from hpctrain.run.reason import Reason

OOM_KILL_FILES = {1: "memory.oom_control", 2: "memory.events"}
"""File with the number of out-of-memory kills in a cgroup, by cgroup version."""


def with_memory_advice(outcome: Outcome, config: Config) -> Outcome:
    """Prepend to an out-of-memory outcome's report the memory that the attempt had, and which keys to change."""
    if outcome.reason is not Reason.OUT_OF_MEMORY:
        return outcome
    return replace(outcome, report=f"killed by the kernel; {_remedy(config)}: {outcome.report}")


def oom_kills(proc: Path = Path("/proc"), mount: Path = Path("/sys/fs/cgroup")) -> int:
    """Count the processes in this process's cgroup that the kernel has killed for lack of memory; 0 if unknown.

    Not from /proc/vmstat, which counts the kills of all users of the machine.

    Args:
        proc: where procfs is mounted.
        mount: where cgroups are mounted.
    """
    for version, group in memory_cgroups(proc, mount):
        with contextlib.suppress(OSError, ValueError):
            for line in (group / OOM_KILL_FILES[version]).read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return 0


def oom_complaint(before: int, codes: Sequence[int | None], records: Mapping[int, ExitRecord]) -> str:
    """Describe an out-of-memory kill among the ranks of this machine; empty if there was none.

    The user's other processes may share the cgroup, so a higher count alone proves nothing: a rank, or one of its
    DataLoader workers, must also have been killed.

    Args:
        before: `oom_kills` before the attempt.
        codes: by rank, the exit code; None for a rank that the launcher killed. Empty if the launching process
            is the only rank.
        records: the ranks' exit records.
    """
    killed = any(code == -signal.SIGKILL and rank not in records for rank, code in enumerate(codes))
    lost_worker = any(LOST_WORKER.search(record.message) for record in records.values())
    if oom_kills() <= before or not (killed or lost_worker or not codes):
        return ""
    return "the kernel killed a process of this cgroup: out of memory"


def _remedy(config: Config) -> str:
    """Return the memory that hpctrain requested, if any, and the keys that are left to change."""
    fewer = ["a smaller data.num_workers"] if config.data.num_workers != 0 else []
    smaller = ["a smaller trainer.micro_batch_size"] if config.trainer.micro_batch_size != 1 else []
    less = f"use {' or '.join([*fewer, *smaller, 'a smaller model'][:2])}"
    if not isinstance(config.cluster, Slurm):
        return less
    if config.cluster.memory_gb is None:
        return f"cluster.memory_gb isn't set, so a node had SLURM's default: set it, or {less}"
    return f"cluster.memory_gb={config.cluster.memory_gb:g} was requested for each node: raise it, or {less}"
