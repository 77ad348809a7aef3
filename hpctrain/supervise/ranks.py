"""The ranks of an attempt: the srun line that starts them, and the step that is watched until all have ended."""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hpctrain.attempt.rank_python import unable_python
from hpctrain.cluster.environment import derived_ports
from hpctrain.cluster.slurm_step import JobVariables, expand_nodelist
from hpctrain.cluster.variables import Variables
from hpctrain.errors import ClusterEnvironmentError, HpctrainError, SchedulerError
from hpctrain.launch.containers import ContainerError, RankContainer
from hpctrain.launch.prepare import RunPlan
from hpctrain.run.checkpoints import saved_step
from hpctrain.run.code import CodeSnapshot
from hpctrain.run.exit_record import read_exit_records
from hpctrain.run.launcher import LauncherFacts
from hpctrain.run.ledger import Attempt, Ledger
from hpctrain.startup import __version__
from hpctrain.supervise.allocation import Allocation
from hpctrain.supervise.job import CurrentJob

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
STEP_GPUS = re.compile(r"--(?:gres|tres-per-task)[= ]\S*gpu|--gpus|(?:^| )-G")
"""Options of srun that ask for GPUs for the step."""
GPUS_PER_TASK = ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_TRES_BIND")
"""Variables of a job with --gpus-per-task, by which srun hides from each rank all GPUs but its own."""
EXITING_S = 15
"""Seconds until srun kills the other ranks after one of them exited cleanly.

All ranks saved before their last barrier. What is left takes a few seconds: to destroy the process group, and to write
an exit record. Some NCCL teardowns hang, and the job has to be requeued within a grace time of 30 s anyway.
The ranks of a program end on their own: one may be done hours before another, so srun waits for all of them.
"""

log = logging.getLogger("hpctrain.supervise")


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksEnd:
    """The end of an attempt's ranks, beyond what they recorded themselves."""

    complaints: str = ""
    """What went wrong, as srun or the supervisor saw it; empty if nothing did."""
    refusal: str = ""
    """Why the ranks can't begin in any attempt, until the user changes something; empty if they can."""
    nodes: Mapping[int, str] = field(default_factory=dict)
    """The node of each failed rank that srun has named."""


class Ranks:
    """Starts the ranks of each attempt of one allocation.

    Args:
        job: is checked when a rank ends badly or srun aborts the step: SLURM may be ending it.
        environ: the batch script's environment.
        allocation: the job's nodes.
    """

    def __init__(self, job: CurrentJob, environ: Mapping[str, str], allocation: Allocation) -> None:
        self._job = job
        self._plan = job.plan
        self._directory = job.directory
        self._environ = environ
        self._allocation = allocation

    def run(self, attempt: int, code: CodeSnapshot | None, *, num_attempts_here: int) -> RanksEnd:
        """Start the ranks, and wait until all have ended.

        Args:
            attempt: number of the attempt.
            code: from which the ranks import; None for their working directory.
            num_attempts_here: the number of attempts in this allocation, with this one.
        """
        variables = self._variables(attempt, code, num_attempts_here)
        nodes, outlives_a_node = self._allocation.step_nodes, self._allocation.outlives_a_node
        container = RankContainer.of_attempt(
            self._plan, attempt, environ=self._environ, step_variables=variables, nodes=nodes, code=code
        )
        job_name = self._environ.get("SLURM_JOB_NAME")
        try:
            command = srun_command(self._plan, nodes if outlives_a_node else (), job_name, code, container)
        except (ContainerError, OSError) as error:
            # a file system that has been lost since the ranks began may come back
            has_begun = isinstance(error, OSError) or self._have_begun()
            return RanksEnd(complaints=str(error)) if has_begun else RanksEnd(refusal=str(error))
        environ = srun_environ(self._plan, {**self._environ, **variables})
        step = Step(command, environ, ends_with_a_node=outlives_a_node)
        try:
            node_problem = self._watch(step)
        except OSError as error:
            why = f"srun can't be started ({error.strerror}); load SLURM's module in cluster.setup, if it isn't in PATH"
            is_final = isinstance(error, FileNotFoundError) and not self._have_begun()
            return RanksEnd(refusal=why) if is_final else RanksEnd(complaints=why)
        log.info("srun exited with code %d", step.code)
        python_problem = unable_python(self._directory, attempt, step.complaints, self._plan.rank_python)
        if python_problem and self._have_begun():
            # it worked before: a node has lost it, such as with a file system, and the next attempt may find it
            return RanksEnd(complaints=node_problem or python_problem, nodes=step.nodes)
        return RanksEnd(complaints=node_problem or "; ".join(step.complaints), refusal=python_problem, nodes=step.nodes)

    def _variables(self, attempt: int, code: CodeSnapshot | None, num_attempts_here: int) -> dict[str, str]:
        """The variables of the ranks, in addition to the batch script's environment."""
        digest = "" if code is None else code.digest
        launcher = LauncherFacts(attempt=attempt, logged=True, code=digest, version=__version__)
        variables = {**launcher.variables(), **self._plan.code_variables(code, self._environ)}
        if self._plan.is_program:
            variables |= program_variables(self._job, self._environ, num_attempts_here)
        return variables

    def _watch(self, step: Step) -> str:
        """Run the step until it ends; return which node can't write into the run directory, if so."""
        node_problem = ""
        # the first message of each kind counts: a thousand nodes that fail must not mean a thousand queries of SLURM
        awaited = {ABORTED, TASKS_ENDED}
        for line in step.run():
            if (no_log := NO_LOG.match(line)) is not None:
                node_problem = self._describe_node_problem(no_log["rank"])
            if first := {message for message in awaited if message.match(line)}:
                awaited -= first
                # srun's message may be the only sign that SLURM kills the job: its SIGTERM may not reach this process.
                # In another thread: srun blocks if its output isn't read
                threading.Thread(target=self._job.check, daemon=True).start()
        return node_problem

    def _describe_node_problem(self, rank: str) -> str:
        """Report that the node of a rank can't write into the run directory; srun names only the rank."""
        nodes = self._allocation.step_nodes
        node = nodes[0] if len(nodes) == 1 else f"the node of rank {rank}"
        remedy = "put the run directory on a file system that all nodes share"
        if len(nodes) > 1:
            remedy += f"; to find the node: python -m hpctrain doctor cluster=slurm nodes={len(nodes)}"
        return f"{node} can't write into {self._directory.path}; {remedy}"

    def _have_begun(self) -> bool:
        """Whether all ranks of an earlier attempt have begun, by their own records."""
        try:
            return bool(saved_step(self._directory)) or any(map(self._began, Ledger(self._directory).attempts()))
        except (OSError, HpctrainError):
            return False

    def _began(self, earlier: Attempt) -> bool:
        # the launcher records a start as well, at the end of an attempt whose ranks didn't: theirs has torch's version
        num_records = len(read_exit_records(self._directory.attempt(earlier.attempt)))
        return earlier.torch is not None or 0 < (earlier.world_size or 0) <= num_records


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
    command = [*restored, *plan.rank_command(code), str(plan.directory.path)]
    options, command = ([], command) if container is None else container.enter(command)
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
        f"--job-name={directory.step_name}",
        "--export=ALL",  # with a site's --export=NONE srun would keep this process's environment from the ranks, too
        "--open-mode=append",
        f"--output={str(directory.logs).replace('%', '%%')}/rank_%t.log",
    ]
    if nodes:
        # SLURM 22.05 never releases the resources of a step on a node that died, so the next step has to share them:
        # without --mem=0, which gives a step all memory that the job has on a node, 22.05.8 refused each of 58 tries in
        # two minutes
        command += [f"--nodelist={','.join(nodes)}", "--no-kill", "--overlap", "--mem=0"]
    cores = resources.cpus_per_process
    if len(plan.node_counts) > 1:
        cores = cores or 1  # the job's own number is that of all ranks of a node
    if cores is not None:
        # since SLURM 22.05, srun doesn't inherit it from sbatch
        command.append(f"--cpus-per-task={cores}")
    if resources.processes_per_node == 1:
        # keeps the ranks in the order of the node list, whatever the switches are; srun chooses it itself, but not with
        # --mem=0. With several ranks per node plane=N would do so, and lose the locality for which SLURM follows
        # switches
        command.append("--distribution=cyclic")
    # the user's own may end with a program, such as numactl
    return [*command, *container, *plan.slurm.srun_args]


def srun_environ(plan: RunPlan, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of srun and of the ranks.

    Args:
        plan: of the run.
        environ: the batch script's environment, and the ranks' own variables.
    """
    removed: set[str] = set()
    if STEP_GPUS.search(" ".join(plan.slurm.srun_args)):
        # srun reads --gpus-per-node from this variable. SLURM 26.05 refuses it together with --gres=gpu, and 22.05.8 a
        # type in it together with --gpus-per-task or --gpus without one
        removed.add("SLURM_GPUS_PER_NODE")
    if "SLURM_GPUS_PER_TASK" in environ or "gpu" in environ.get("SLURM_TRES_PER_TASK", ""):
        # 26.05 shows each rank its own GPU alone, with which NCCL may fail; 22.05.8 none, if the GPUs have a type
        removed.update(GPUS_PER_TASK)
    return {name: value for name, value in environ.items() if name not in removed}


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
                # the ranks that did start would wait for the others. Not at the first lost peer: a rank that died alone
                # needs no other node
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


def program_variables(job: CurrentJob, environ: Mapping[str, str], num_attempts_here: int) -> dict[str, str]:
    """Return `MASTER_PORT`, and `HPCTRAIN_DEADLINE` if SLURM answers, which is asked once: the ranks wait.

    Args:
        job: of the batch script.
        environ: the batch script's environment.
        num_attempts_here: attempts in this allocation, the new one included.
    """
    port = job.plan.config.cluster.master_port
    variables = {"MASTER_PORT": str(_free_port(environ, num_attempts_here) if port is None else port)}
    try:
        record = job.slurm.show(job.job_id)
    except SchedulerError as error:
        log.info("HPCTRAIN_DEADLINE isn't set, because SLURM doesn't answer: %s", error)
    else:
        if record is not None and record.end_time is not None:
            variables["HPCTRAIN_DEADLINE"] = str(record.end_time)
    return variables


def _free_port(environ: Mapping[str, str], num_attempts_here: int) -> int:
    """Return the first derived port that can be bound on this node, which usually is rank zero's."""
    job = JobVariables.read(Variables(environ))
    candidates = derived_ports(job=job.number, step=num_attempts_here, restart=job.restart_count)
    return next(filter(_can_be_bound, candidates), candidates[0])


def _can_be_bound(port: int) -> bool:
    with socket.socket() as probe:
        # as the rendezvous of a program does: connections of an earlier attempt may still be closing
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True
