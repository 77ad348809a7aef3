"""The control groups under which SLURM keeps the processes of jobs, a tree of its own for each node.

On the host they are `slurm-sandbox-NAME/NODE`, under each controller in version 1. A node sees nothing above that: it
is in a control group namespace, and its SLURM finds its part in the state directory. So two sandboxes never share a
group, although SLURM gives the groups of both the same names, and systemd is not asked for any.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from options import Options
from problem import SandboxError

ROOT = Path("/sys/fs/cgroup")
CONTROL = "cgroup.subtree_control"
LEAF = "machine"  # for the node's own processes
SLICE = "system.slice"  # where slurmd expects to make groups


@dataclass(frozen=True)
class Groups:
    """What SLURM can use on this machine.

    Attributes:
        version: 1 or 2; 0 where it can use none, and follows parents and children.
        controllers: freezer in version 1, where following processes needs one; memory where there are limits.
    """

    version: int
    controllers: tuple[str, ...] = ()

    def of(self, name: str, machine: str) -> list[Path]:
        """The groups of one node of the sandbox."""
        tops = [ROOT / controller for controller in self.controllers] if self.version == 1 else [ROOT]
        return [top / f"slurm-sandbox-{name}" / machine for top in tops] if self.version else []

    def mounts(self, home: Path) -> list[Path]:
        """Where the node's SLURM finds them, in the same order."""
        if self.version == 1:
            return [home / "cgroup" / controller for controller in self.controllers]
        return [home / "cgroup"]

    @property
    def limits_swap(self) -> bool:
        """Whether the kernel can limit swap as well as memory."""
        return any(ROOT.glob("memory/memory.memsw.limit_in_bytes" if self.version == 1 else "*/memory.swap.max"))


def detect(options: Options) -> Groups:
    """Look at this machine.

    Raises:
        SandboxError: Memory limits are asked for, and this machine can't; exit code 2.
    """
    memory = ("memory",) if options.memory_limits else ()
    if all(os.access(ROOT / controller / "tasks", os.W_OK) for controller in ("freezer", *memory)):
        return Groups(1, ("freezer", *memory))
    # SLURM 22.05 does not recognise the last controller in the kernel's list, so that it must not be memory.
    unified = {"memory", "pids"} if options.memory_limits else set()
    if os.access(ROOT / "cgroup.procs", os.W_OK) and unified <= set((ROOT / CONTROL).read_text().split()):
        return Groups(2, memory)
    if memory:
        raise SandboxError(
            f"--memory-limits needs the memory controller of control groups: {ROOT}/memory of version 1, or the words "
            f"memory and pids in {ROOT}/{CONTROL} of version 2, and the right to make groups there; found neither",
            exit_code=2,
        )
    return Groups(0)


def create(groups: Groups, name: str, machine: str) -> list[Path]:
    """Make the groups of one node, and return them."""
    made = groups.of(name, machine)
    for group in made:
        group.mkdir(parents=True, exist_ok=True)
        if groups.version == 2:
            (group / LEAF).mkdir(exist_ok=True)
            (group / SLICE).mkdir(exist_ok=True)
    return made


def settle(groups: Groups, name: str, machine: str, first: int, parent: int) -> None:
    """Move a node's first process, and its parent on the host, out of SLURM's way.

    In version 2 a group has either processes, or groups with limits; and SLURM from 24.05 on accepts no group that
    has a process of another process namespace.
    """
    for group in groups.of(name, machine) if groups.version == 2 else []:
        outside = group.parent / "outside"
        outside.mkdir(exist_ok=True)
        for leaf, pid in ((group / LEAF, first), (outside, parent)):
            (leaf / "cgroup.procs").write_text(str(pid))
        for above in (group.parent, group, group / SLICE) if groups.controllers else ():
            offered = (above / "cgroup.controllers").read_text().split()
            (above / CONTROL).write_text(" ".join(f"+{controller}" for controller in offered))


def enter(home: Path) -> list[str]:
    """The command prefix which puts a daemon into its node's leaf: in version 2 slurmd won't start outside."""
    join = '[ ! -d "$1" ] || echo $$ > "$1/cgroup.procs"; shift; exec "$@"'
    return ["sh", "-c", join, "sh", f"{home}/cgroup/{LEAF}"]


def remove(name: str, machine: str = "") -> None:
    """Remove the groups of one node, or of all, which no process is in any more."""
    for pattern in ("", "*/"):
        for top in ROOT.glob(f"{pattern}slurm-sandbox-{name}/{machine}"):
            for directory, _, _ in os.walk(top, topdown=False):
                _remove(Path(directory))


def _remove(group: Path, timeout_s: float = 5) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return group.rmdir()
        except OSError as error:  # busy for a moment after its last process has died
            if time.monotonic() > deadline:
                inside = (group / "cgroup.procs").read_text().split()
                raise SandboxError(f"{error}; processes in it: {inside}") from error
            time.sleep(0.02)
