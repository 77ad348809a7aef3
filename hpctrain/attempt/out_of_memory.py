"""Out-of-memory kills: detect them, and name the keys that request more memory or use less."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hpctrain.attempt.outcome import LOST_WORKER, Outcome
from hpctrain.config.cluster import Slurm
from hpctrain.config.root import Config, RunConfig
from hpctrain.phrases import either
from hpctrain.run.exit_record import ExitRecord
from hpctrain.run.process import memory_cgroups
from hpctrain.run.reason import Reason

OOM_KILL_FILES = {1: "memory.oom_control", 2: "memory.events"}
"""File with the number of out-of-memory kills in a cgroup, by cgroup version."""


def with_memory_advice(outcome: Outcome, config: RunConfig) -> Outcome:
    """Prepend to an out-of-memory outcome's report which keys to change."""
    if outcome.reason is not Reason.OUT_OF_MEMORY:
        return outcome
    return replace(outcome, report=f"killed by the kernel; {memory_advice(config)}: {outcome.report}")


def memory_advice(config: RunConfig) -> str:
    """Return which keys request more memory of a node, or use less of it."""
    remedies = []
    if isinstance(config.cluster, Slurm):
        memory_gb = config.cluster.memory_gb
        default = "set cluster.memory_gb (it is unset, so each node has SLURM's default)"
        remedies.append(default if memory_gb is None else f"raise cluster.memory_gb above {memory_gb:g} (GB per node)")
    if isinstance(config, Config) and config.data.num_workers != 0:
        remedies.append("use a smaller data.num_workers")
    if isinstance(config, Config) and config.trainer.micro_batch_size != 1:
        remedies.append("use a smaller trainer.micro_batch_size")
    if not isinstance(config, Config):
        return either(remedies or ["let the program use less memory"])
    return either(remedies or ["use a smaller model"])


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
