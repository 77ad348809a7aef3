"""One srun step: it runs the ranks of an attempt, and srun reports how they ended."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hpctrain.cluster.slurm_step import expand_nodelist
from hpctrain.errors import ClusterEnvironmentError
from hpctrain.launch.containers.engines import enter_container
from hpctrain.launch.containers.rank_container import RankContainer
from hpctrain.launch.prepare import RunPlan
from hpctrain.launch.rank_command import rank_command
from hpctrain.run.code import CodeSnapshot
from hpctrain.run.directory import RunDirectory

COMPLAINT = re.compile(r"(?:srun|slurmstepd\S*): (?:error: |fatal: )?(?P<text>.*)")
NOT_OF_INTEREST = re.compile(r"launch/slurm: |Job step aborted|Force Terminated")
"""Messages of srun about its own reactions to a failure, not about the failure itself."""
ABORTED = re.compile(r"srun: Job step aborted")
"""Printed when the job ends, unless the controller has forgotten the step, and when a task has ended badly."""
NODE_FAILED = re.compile(r"srun: error: Node failure on \S")
NO_LOG = re.compile(r"srun: error: task (?P<rank>\d+) launch failed: Slurmd could not connect IO")
"""Printed when a node can't open the log of a rank: it doesn't see the run directory, or can't reach srun."""
TASKS_ENDED = re.compile(r"srun: error: (?P<node>[\w.-]+): tasks? (?P<ranks>[\d,-]+): ")
"""Printed about tasks of one node that were killed, or exited with a nonzero code."""
KEPT_LINES = 8
STEP_GPUS = re.compile(r"--gres[= ]\S*gpu")
"""Options of srun that ask for GPUs for the step."""
EXITING_S = 15
"""Seconds until srun kills the other ranks after one of them exited in good order.

All ranks saved before their last barrier. What is left takes a few seconds: to destroy the process group, and to write
an exit record. Some NCCL teardowns hang, and the job has to be requeued within a grace time of 30 s all the same.
The ranks of a program end on their own: one may be done hours before another, so srun waits for all of them.
"""


def step_name(directory: RunDirectory) -> str:
    """The name of the steps of a run, by which a new supervisor finds its ranks: others in the job are the user's."""
    return f"hpctrain_{zlib.crc32(os.fsencode(directory.path)):08x}"


def srun_command(
    plan: RunPlan,
    nodes: Sequence[str] = (),
    job_name: str | None = None,
    code: CodeSnapshot | None = None,
    container: RankContainer | None = None,
) -> list[str]:
    """The srun line that starts the ranks; their output is appended to a log per rank.

    Args:
        plan: of the run.
        nodes: the nodes for the ranks, in a job that outlives a node; empty in another job, whose nodes all get ranks.
        job_name: of the job, for the ranks' environment; None leaves them the name of the step.
        code: from which the ranks import; None for their working directory.
        container: in which the ranks run, and which is prepared here; None if they run outside of one.

    Raises:
        ContainerError: the image can't be used.
        OSError: the container can't be prepared, because the file system is unavailable.
    """
    # where too few nodes are left, srun is to refuse
    num_nodes = max(len(nodes), plan.node_counts[-1]) if nodes else plan.resources.num_nodes
    # --job-name also changes SLURM_JOB_NAME in the environment of the ranks
    restored = [] if job_name is None else ["env", f"SLURM_JOB_NAME={job_name}"]
    command = [*restored, *rank_command(plan, code), str(plan.directory.path)]
    options: list[str] = []
    if container is not None:
        options, command = enter_container(container, command)
    return [*srun_options(plan, nodes, num_nodes=num_nodes, container=options), *command]


def srun_options(plan: RunPlan, nodes: Sequence[str], *, num_nodes: int, container: Sequence[str] = ()) -> list[str]:
    """The command srun and its options for ranks, without what they execute.

    Args:
        plan: of the run.
        nodes: the nodes for the ranks, which may be fewer than the job's; empty for any.
        num_nodes: on how many nodes the ranks run.
        container: options that start the ranks' container.
    """
    resources, directory = plan.resources, plan.directory
    command = [
        "srun",
        f"--nodes={num_nodes}",
        f"--ntasks={num_nodes * resources.processes_per_node}",
        f"--ntasks-per-node={resources.processes_per_node}",
        "--kill-on-bad-exit=1",
        f"--wait={0 if plan.is_program else EXITING_S}",  # 0: without a limit
        f"--job-name={step_name(directory)}",
        "--export=ALL",  # with a site's --export=NONE srun would keep this process's environment from the ranks, too
        "--open-mode=append",
        f"--output={str(directory.logs).replace('%', '%%')}/rank_%t.log",
    ]
    if nodes:
        # SLURM 22.05 never releases the resources of a step on a node that died, so the next step has to share them
        command += [f"--nodelist={','.join(nodes)}", "--no-kill", "--overlap", "--mem=0"]
    cores = resources.cpus_per_process
    if len(plan.node_counts) > 1:
        cores = cores or 1  # the job's own number is that of all ranks of a node
    if cores is not None:
        # since SLURM 22.05, srun doesn't inherit it from sbatch
        command.append(f"--cpus-per-task={cores}")
    if resources.processes_per_node == 1:
        # keeps the ranks in the order of the node list, whatever the switches are; srun chooses it itself, but not with
        # --mem=0
        command.append("--distribution=cyclic")
    # the user's own may end with a program, such as numactl
    return [*command, *container, *plan.slurm.srun_args]


def srun_environ(plan: RunPlan, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of srun and of the ranks.

    Args:
        plan: of the run.
        environ: the batch script's environment, and the ranks' own variables.
    """
    if not STEP_GPUS.search(" ".join(plan.slurm.srun_args)):
        return dict(environ)
    # srun reads --gpus-per-node from this variable, and SLURM 26.05 refuses it together with --gres=gpu
    return {name: value for name, value in environ.items() if name != "SLURM_GPUS_PER_NODE"}


@dataclass
class Step:
    """A step of srun.

    Args:
        command: the srun line.
        environ: its environment.
        ends_with_a_node: end the step when one of its nodes fails; the other ranks would wait for those on it.

    Attributes:
        code: srun's exit code once it has ended; non-zero is a hint that a rank failed, but doesn't show how.
        complaints: srun's messages about tasks that failed, or about why it started none.
        nodes: the node of each failed rank that srun has named.
    """

    command: Sequence[str]
    environ: Mapping[str, str]
    ends_with_a_node: bool = False
    code: int = 0
    complaints: list[str] = field(default_factory=list)
    nodes: dict[int, str] = field(default_factory=dict)

    def run(self) -> Iterator[str]:
        """Run srun until it ends; yield the lines of its standard error, which are also copied to this process's."""
        with subprocess.Popen(
            self.command,
            env=dict(self.environ),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        ) as process:
            assert process.stderr is not None
            for line in process.stderr:
                print_error(line.rstrip("\n"))
                # the ranks that did start would wait for the others
                if NO_LOG.match(line) or (self.ends_with_a_node and NODE_FAILED.match(line)):
                    process.terminate()
                self._locate(line)
                complaint = COMPLAINT.match(line)
                if complaint and not NOT_OF_INTEREST.search(line) and len(self.complaints) < KEPT_LINES:
                    self.complaints.append(complaint["text"].strip())
                yield line
        self.code = process.returncode

    def _locate(self, line: str) -> None:
        """Learn the nodes of ranks from a message of srun."""
        match = TASKS_ENDED.match(line)
        # srun cuts a long list off, and has no name for the nodes of a very large step
        if match is not None and match["node"] != "Unknown":
            with contextlib.suppress(ClusterEnvironmentError):
                self.nodes |= dict.fromkeys(map(int, expand_nodelist(f"[{match['ranks']}]")), match["node"])


def print_error(text: str) -> None:
    """Print into the batch script's log, which may be on a full disk."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
