"""The machines of a sandbox: one process each, which holds the namespaces of a node or of the controller.

A machine has its own network, host name, processes, mounts, shared memory and System V IPC, and shares the host's
files. All that runs on it is a descendant of its first process in the process namespace: with that one, the kernel
kills the rest.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import cgroups
from cgroups import Groups
from problem import SandboxError

NAMESPACES = ("--net", "--uts", "--mount", "--pid", "--ipc", "--cgroup")
# The control groups that a process is in become the root of those that its new namespace sees.
JOIN_GROUPS = 'for group in $SLURM_SANDBOX_GROUPS; do echo $$ > $group/cgroup.procs; done; exec "$@"'
# This is the machine's process 1: SIGCHLD ignored makes the kernel reap what is orphaned. -n: no notes under /run.
FIRST_PROCESS = """set -e
trap '' CHLD
hostname $SLURM_SANDBOX_MACHINE
mount -n -t tmpfs -o mode=755,size=256m spool $SLURM_SANDBOX_HOME/spool
mount -n -t tmpfs -o mode=1777 shm /dev/shm
mount -n --bind $SLURM_SANDBOX_HOME/hosts /etc/hosts
set -- $SLURM_SANDBOX_GROUP_MOUNTS
for group in $SLURM_SANDBOX_GROUPS; do mount -n --bind $group $1; shift; done
[ ! -d /etc/slurm ] || mount -n --bind $SLURM_SANDBOX_HOME /etc/slurm
ip link set lo up
echo ready
exec sleep infinity >/dev/null 2>&1
"""


@dataclass(frozen=True)
class Machine:
    """A machine that runs.

    Attributes:
        home: The sandbox's state directory.
        name: Its host name.
        pid: Its first process, as the host numbers it.
    """

    home: Path
    name: str
    pid: int

    def command(self, *argv: str) -> list[str]:
        """The command line which runs `argv` on this machine, in the current directory."""
        return ["nsenter", f"--target={self.pid}", *NAMESPACES, f"--wd={Path.cwd()}", "--", *argv]

    def network_command(self, *argv: str) -> list[str]:
        """The command line which runs `argv` on the host, but in this machine's network."""
        return ["nsenter", f"--target={self.pid}", "--net", "--", *argv]

    def begin(self, *argv: str) -> subprocess.Popen[str]:
        """Run a command on this machine, with nothing of the caller's environment; its pipe has all that it prints."""
        return subprocess.Popen(
            self.command(*argv),
            env={"PATH": os.environ["PATH"], "SLURM_CONF": f"{self.home}/daemons.conf"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *argv: str) -> str:
        """Run a command on this machine to its end; returns what it printed.

        Raises:
            SandboxError: It failed.
        """
        process = self.begin(*argv)
        output, _ = process.communicate()
        if process.returncode != 0:
            raise SandboxError(f"on {self.name}: {' '.join(argv)}: {output.strip()}")
        return output

    def kill(self) -> None:
        """SIGKILL to every process of this machine at once; returns when they are gone."""
        _kill([self.pid])


def start(home: Path, names: Sequence[str], groups: Groups) -> dict[str, Machine]:
    """Start machines, all at the same time, and return them by name.

    Raises:
        SandboxError: The kernel refused a namespace or a mount.
    """
    starting = {name: _spawn(home, name, groups) for name in names}
    for name, process in starting.items():
        assert process.stdout is not None
        with process.stdout as out:
            line = out.readline()
        if line.strip() != "ready":
            raise SandboxError(
                f"{name} did not start: {line.strip() or 'no message'}\n"
                "it needs root with all capabilities; in a container, that is one started as privileged"
            )
    while not starting.keys() <= (running := find(home)).keys():
        if ended := [name for name, process in starting.items() if process.poll() is not None]:
            raise SandboxError(f"{', '.join(ended)} ended as soon as started: were they killed?")
        time.sleep(0.005)  # during execve(2), the kernel shows no environment
    for name, process in starting.items():
        cgroups.settle(groups, home.name, name, running[name].pid, process.pid)
    return {name: running[name] for name in names}


def find(home: Path) -> dict[str, Machine]:
    """The machines of the sandbox that run, by name."""
    found = {}
    for pid, environ in _marked(home):
        name = environ.partition(b"SLURM_SANDBOX_MACHINE=")[2].partition(b"\0")[0].decode()
        with suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text()
            numbers = status.partition("NSpid:")[2].partition("\n")[0].split()
            if len(numbers) > 1 and numbers[-1] == "1":
                found[name] = Machine(home, name, pid)
    return dict(sorted(found.items()))


def kill_all(home: Path) -> None:
    """SIGKILL to every process of every machine, whatever state a broken start left them in."""
    scans_without = 0
    while scans_without < 2:  # a process that is in execve(2) during the first scan shows up in the second
        _kill([machine.pid for machine in find(home).values()])
        rest = [pid for pid, _ in _marked(home)]
        _kill(rest)
        scans_without = 0 if rest else scans_without + 1
        time.sleep(0.01)


def _spawn(home: Path, name: str, groups: Groups) -> subprocess.Popen[str]:
    flags = [*NAMESPACES, "--fork", "--kill-child", "--mount-proc", "--propagation=slave"]
    paths, mounts = cgroups.create(groups, home.name, name), groups.mounts(home)
    for mount in mounts:
        mount.mkdir(parents=True, exist_ok=True)
    return subprocess.Popen(
        ["sh", "-c", JOIN_GROUPS, "sh", "unshare", *flags, "sh", "-c", FIRST_PROCESS],
        env={
            "PATH": os.environ["PATH"],
            "SLURM_SANDBOX_HOME": str(home),
            "SLURM_SANDBOX_MACHINE": name,
            "SLURM_SANDBOX_GROUPS": " ".join(map(str, paths)),
            "SLURM_SANDBOX_GROUP_MOUNTS": " ".join(map(str, mounts)),
        },
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
    )


def _marked(home: Path) -> list[tuple[int, bytes]]:
    """The processes that hold a machine of this sandbox, with their environments. Zombies have none."""
    mark = f"SLURM_SANDBOX_HOME={home}\0".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                environ = (entry / "environ").read_bytes()
                if mark in environ:
                    found.append((int(entry.name), environ))
    return found


def _kill(pids: list[int], timeout_s: float = 30) -> None:
    handles = []
    for pid in pids:
        with suppress(ProcessLookupError):
            handles.append((pid, os.pidfd_open(pid)))
            signal.pidfd_send_signal(handles[-1][1], signal.SIGKILL)
    deadline = time.monotonic() + timeout_s
    for pid, handle in handles:
        while _alive(pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        os.close(handle)
        if _alive(pid):
            raise SandboxError(f"process {pid} can't be killed within {timeout_s:g} s: see /proc/{pid}/stack")


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
