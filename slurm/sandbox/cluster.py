"""SLURM as its users see it: questions and requests to the controller."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from options import CPUS_PER_NODE
from problem import SandboxError

IN_SERVICE = {"idle", "alloc", "mix", "comp", "plnd", "resv"}


class Cluster:
    """The SLURM of one sandbox, asked from the host."""

    def __init__(self, home: Path) -> None:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_", "SRUN_"))}
        self.environ = {**inherited, "SLURM_CONF": str(home / "slurm.conf")}

    def ask(self, *argv: str) -> str:
        """Run a SLURM command and return what it printed.

        Raises:
            SandboxError: It failed.
        """
        done = subprocess.run(argv, env=self.environ, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SandboxError(f"{' '.join(argv)}: {(done.stderr + done.stdout).strip()}")
        return done.stdout

    def answers(self) -> bool:
        """Whether the controller answers."""
        command = ["scontrol", "ping"]
        done = subprocess.run(command, env=self.environ, capture_output=True, text=True, check=False)
        return " is UP" in done.stdout

    def node_states(self) -> dict[str, str]:
        """The state of each node in sinfo's short form, such as `idle`, `alloc`, `down*`."""
        rows = self.ask("sinfo", "--noheader", "--Node", "--partition=low", "--format=%n %t").splitlines()
        return dict(row.split() for row in rows)

    def wait_idle(self, nodes: list[str], timeout_s: float) -> None:
        """Wait until every one of the nodes is idle.

        Raises:
            SandboxError: The time is over.
        """
        self._wait(nodes, lambda state: state == "idle", timeout_s)

    def return_to_service(self, node: str, timeout_s: float) -> None:
        """Wait until the node takes jobs, and ask for that where SLURM has marked it DOWN.

        Raises:
            SandboxError: The time is over.
        """

        def takes_jobs(state: str) -> bool:
            if state.startswith(("down", "drain", "drng", "fail")):
                resume = ["scontrol", "update", f"nodename={node}", "state=resume"]
                # Refused where the node has just come back by itself.
                subprocess.run(resume, env=self.environ, capture_output=True, check=False)
            return state in IN_SERVICE

        self._wait([node], takes_jobs, timeout_s)

    def _wait(self, nodes: list[str], good: Callable[[str], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            states = {}
            with suppress(SandboxError):  # on a busy machine the controller may answer one question and not the next
                states = self.node_states() if self.answers() else {}
            if all(good(states.get(node, "unknown")) for node in nodes):
                return
            if time.monotonic() > deadline:
                found = ", ".join(f"{node} {states.get(node, 'unknown')}" for node in nodes)
                raise SandboxError(f"not in service after {timeout_s:g} s: {found}")
            time.sleep(0.05)

    def preempt(self, nodes: int, seconds: int) -> str:
        """Submit a job to the partition `high` that takes whole nodes; returns its job id."""
        size = [f"--nodes={nodes}", f"--ntasks-per-node={CPUS_PER_NODE}", "--exclusive"]
        silent = ["--output=/dev/null", "--job-name=preempt", "--no-requeue"]
        wrap = f"--wrap=sleep {seconds}"
        return self.ask("sbatch", "--parsable", "--partition=high", *size, *silent, wrap).strip()

    def jobs(self) -> list[str]:
        """The job ids in the queue."""
        return self.ask("squeue", "--noheader", "--format=%i").split()
