"""Check that runs leave nothing on the nodes of a sandbox."""

from __future__ import annotations

import contextlib
import io
import json
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.cli.inspect import main as inspect
from hpctrain.config.plain_yaml import is_program
from hpctrain.files import TEMPORARY_PREFIX
from tests.slurm.programs.followed_run import FollowedRun

if TYPE_CHECKING:
    from tests.slurm.conftest import SlurmSandbox

OF_THE_NODE = {"sleep", "slurmd", "slurmstepd"}
"""The first process of a node, SLURM's daemon, and what of it reports a step's end: for minutes, to a job script that
was cut off. The step's processes are its children, with names of their own."""
TIMEOUT_S = 45.0
"""SLURM ends what is left of a job within KillWait, and a job that preempted another one is over soon."""

OF_PYTORCH = re.compile(r"torch_\d+_\d+_\d+")
"""Shared memory of PyTorch (ATen/MapAllocator.cpp, NewProcessWideShmHandle)."""
MOST_CUT_OFF = 2
"""Loading processes of one run's last attempts, so many of which a kill may meet in the microseconds that matter."""


def assert_nothing_is_left(sandbox: SlurmSandbox, runs: Iterable[FollowedRun]) -> None:
    """No process and no shared memory on any node; no half of a checkpoint that `inspect` doesn't name.

    Raises:
        AssertionError: something is left.
    """
    deadline = time.monotonic() + TIMEOUT_S
    while left := [*processes_on(sandbox), *more_than_the_killed_leave(shared_memory_on(sandbox))]:
        assert time.monotonic() < deadline, "left on the nodes:\n" + "\n".join(left)
        time.sleep(0.25)
    for run in runs:
        assert_inspect_names_all(run)


def first_processes(sandbox: SlurmSandbox) -> dict[int, str]:
    """The first process of each node that is alive, as this machine numbers it, and the node."""
    found = {}
    mark = f"SLURM_SANDBOX_HOME=/run/slurm-sandbox/{sandbox.name}\0".encode()
    for entry in numbered():
        try:
            environ = b"\0" + (entry / "environ").read_bytes()
            numbers = (entry / "status").read_text().partition("NSpid:")[2].partition("\n")[0].split()
        except OSError:
            continue
        if b"\0" + mark in environ and numbers[1:] == ["1"]:
            name = environ.partition(b"\0SLURM_SANDBOX_MACHINE=")[2].partition(b"\0")[0].decode()
            if name in sandbox.nodes:
                found[int(entry.name)] = name
    return found


def processes_on(sandbox: SlurmSandbox) -> list[str]:
    """The processes in the nodes' process namespaces that no idle node has."""
    names = {namespace(Path("/proc", str(pid))): name for pid, name in first_processes(sandbox).items()}
    assert sorted(names.values()) == sandbox.nodes, f"expected all nodes alive, found {sorted(names.values())}"
    found = []
    for entry in numbered():
        try:
            node = names.get(namespace(entry))
            command, state = (entry / "stat").read_text().partition("(")[2].rpartition(")")[::2]
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if node is not None and command not in OF_THE_NODE and state.split()[0] not in "ZX":
            found.append(f"{node}: process {entry.name}: {line or command}")
    return found


def namespace(process: Path) -> str:
    """The process namespace of a process."""
    return str((process / "ns" / "pid").readlink())


def shared_memory_on(sandbox: SlurmSandbox) -> list[str]:
    """The files in the nodes' /dev/shm, which each node has for itself."""
    return [
        f"{node}: /dev/shm/{path.name}" for node, folder in shared_memory(sandbox).items() for path in folder.iterdir()
    ]


def shared_memory(sandbox: SlurmSandbox) -> dict[str, Path]:
    """Each node's /dev/shm, as this machine sees it."""
    return {node: Path(f"/proc/{pid}/root/dev/shm") for pid, node in first_processes(sandbox).items()}


def more_than_the_killed_leave(files: list[str]) -> list[str]:
    """Files of shared memory, without those of loading processes that were killed while they made one.

    A worker makes a file, maps it and removes its name at once. If it is killed in between, the file stays.
    """
    cut_off = [file for file in files if OF_PYTORCH.fullmatch(Path(file).name)]
    return files if len(cut_off) > MOST_CUT_OFF else [file for file in files if file not in cut_off]


def assert_inspect_names_all(run: FollowedRun) -> None:
    """`inspect` lists everything in the folder of checkpoints, which a program may use in its own way."""
    if is_program(run.directory.config):
        return
    there = {str(path) for path in run.directory.checkpoints.iterdir()}
    if not there:
        return
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        inspect([str(run.directory.path), "--json"])
    found = json.loads(output.getvalue())
    assert {saved["path"] for saved in found["checkpoints"]} | set(found["set_aside"]) | set(
        found["unfinished"]
    ) == there
    assert set(found["unfinished"]) == {path for path in there if Path(path).name.startswith(TEMPORARY_PREFIX)}


def numbered() -> Iterable[Path]:
    """The processes of this machine, those of the nodes among them."""
    return [entry for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
