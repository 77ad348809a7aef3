"""One srun step: the ranks of an attempt, and what srun says of their ends."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hpctrain.config.cluster import Slurm as SlurmCluster
from hpctrain.config.resources import resources_of
from hpctrain.config.root import Config
from hpctrain.run.directory import RunDirectory
from hpctrain.supervise.batch_log import say

COMPLAINT = re.compile(r"(?:srun|slurmstepd\S*): (?:error: |fatal: )?(?P<text>.*)")
NOT_OF_INTEREST = re.compile(r"launch/slurm: |Job step aborted|Force Terminated")
"""What srun says of its own doings once something has happened."""
ABORTED = re.compile(r"srun: Job step aborted")
"""Said when the job ends, and when a task has."""
NODE_FAILED = re.compile(r"srun: error: Node failure on \S")
KEPT_LINES = 8


def srun_command(config: Config, directory: RunDirectory, nodes: Sequence[str] = ()) -> list[str]:
    """The srun line that starts the ranks; their output is appended to a log per rank.

    Args:
        config: of the run.
        directory: of the run.
        nodes: where the ranks run, in a job with nodes to spare; () where it has none.
    """
    cluster = config.cluster
    assert isinstance(cluster, SlurmCluster)
    resources = resources_of(config)
    command = [
        "srun",
        f"--nodes={resources.num_nodes}",
        f"--ntasks={resources.world_size}",
        f"--ntasks-per-node={resources.processes_per_node}",
        "--kill-on-bad-exit=1",
        "--export=ALL",  # where a site submits with --export=NONE, srun would keep this script's environment back too
        "--open-mode=append",
        f"--output={str(directory.logs).replace('%', '%%')}/rank_%t.log",
    ]
    if nodes:
        # what a step had on a node that died is never given back, so the next one has to share it (SLURM 22.05)
        command += [f"--nodelist={','.join(nodes)}", "--no-kill", "--overlap", "--mem=0"]
    if resources.cpus_per_process is not None:
        # srun doesn't take it over from sbatch since SLURM 22.05
        command.append(f"--cpus-per-task={resources.cpus_per_process}")
    return [*command, *cluster.srun_args, sys.executable, "-u", "-m", "hpctrain.worker", str(directory.path)]


@dataclass(frozen=True, slots=True)
class StepEnd:
    """A finished step.

    Attributes:
        code: srun's exit code; no witness of what happened, only that something may have.
        said: what srun complained of: tasks that ended badly, or why it started none.
    """

    code: int
    said: tuple[str, ...]


def run_step(
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    ends_with_a_node: bool = False,
    aborted: Callable[[], None] = lambda: None,
) -> StepEnd:
    """Run srun to its end; what it prints goes to this process's output as well.

    Args:
        command: the srun line.
        environ: its environment.
        ends_with_a_node: end the step when one of its nodes fails; the other ranks would wait for those on it.
        aborted: called as soon as srun says that the step is being ended.
    """
    said: list[str] = []
    with subprocess.Popen(
        command, env=dict(environ), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            say(line.rstrip("\n"))
            if ends_with_a_node and NODE_FAILED.match(line):
                process.terminate()
            if ABORTED.match(line):
                aborted()
            complaint = COMPLAINT.match(line)
            if complaint and not NOT_OF_INTEREST.search(line) and len(said) < KEPT_LINES:
                said.append(complaint["text"].strip())
    return StepEnd(process.returncode, tuple(said))
