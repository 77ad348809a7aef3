"""The ranks of an attempt: started in a step of srun, and watched until all have ended."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hpctrain.attempt.rank_python import unable_python
from hpctrain.errors import HpctrainError
from hpctrain.launch.containers.rank_container import ContainerError, RankContainer
from hpctrain.launch.prepare import RunPlan
from hpctrain.launch.rank_command import code_variables, rank_python
from hpctrain.run.checkpoints import saved_step
from hpctrain.run.code import CheckedCode
from hpctrain.run.exit_record import read_exit_records
from hpctrain.run.launcher import Handover
from hpctrain.run.ledger import Attempt, Ledger
from hpctrain.scheduler.slurm import Slurm
from hpctrain.startup import __version__
from hpctrain.supervise.allocation import Allocation
from hpctrain.supervise.program_variables import program_variables
from hpctrain.supervise.step import ABORTED, NO_LOG, TASKS_ENDED, Step, srun_command, srun_environ, step_name

log = logging.getLogger("hpctrain.supervise")


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksEnd:
    """How the ranks ended, beyond what they recorded themselves."""

    complaints: str = ""
    """What went wrong, as srun or the supervisor saw it; empty if nothing did."""
    refusal: str = ""
    """Why the ranks can't begin in any attempt, until the user changes something; empty if they can."""
    nodes: Mapping[int, str] = field(default_factory=dict)
    """The node of each failed rank that srun has named."""


class Ranks:
    """Starts the ranks of each attempt of one allocation.

    Args:
        plan: of the run.
        environ: the batch script's environment.
        slurm: is asked when the job ends, for the variables of a program.
        job_id: of the job, as users type it.
        allocation: its nodes.
        on_bad_end: called when a rank ends badly or srun aborts the step: SLURM may be ending the job.
    """

    def __init__(
        self,
        plan: RunPlan,
        environ: Mapping[str, str],
        slurm: Slurm,
        job_id: str,
        allocation: Allocation,
        *,
        on_bad_end: Callable[[], None],
    ) -> None:
        self._plan = plan
        self._directory = plan.directory
        self._environ = environ
        self._slurm = slurm
        self._job_id = job_id
        self._allocation = allocation
        self._on_bad_end = on_bad_end

    def run(self, attempt: int, code: CheckedCode, *, in_allocation: int) -> RanksEnd:
        """Start the ranks, and wait until all have ended.

        Args:
            attempt: number of the attempt.
            code: from which the ranks import.
            in_allocation: the number of attempts in this allocation, with this one.
        """
        given = self._variables(attempt, code, in_allocation)
        nodes, outlives_a_node = self._allocation.step_nodes, self._allocation.outlives_a_node
        container = RankContainer.of_attempt(
            self._plan,
            attempt,
            step=step_name(self._directory),
            environ=self._environ,
            given=given,
            nodes=nodes,
            code=code.copy,
        )
        job_name = self._environ.get("SLURM_JOB_NAME")
        try:
            command = srun_command(self._plan, nodes if outlives_a_node else (), job_name, code.copy, container)
        except (ContainerError, OSError) as error:
            # a file system that has been lost since the ranks began may come back
            has_begun = isinstance(error, OSError) or self._have_begun()
            return RanksEnd(complaints=str(error)) if has_begun else RanksEnd(refusal=str(error))
        environ = srun_environ(self._plan, {**self._environ, **given})
        step = Step(command, environ, ends_with_a_node=outlives_a_node)
        unseen = self._watch(step)
        log.info("srun ended with %d", step.code)
        unable = unable_python(self._directory, attempt, step.complaints, rank_python(self._plan))
        if unable and self._have_begun():
            # it worked before: a node has lost it, such as with a file system, and the next attempt may find it
            return RanksEnd(complaints=unseen or unable, nodes=step.nodes)
        return RanksEnd(complaints=unseen or "; ".join(step.complaints), refusal=unable, nodes=step.nodes)

    def _variables(self, attempt: int, code: CheckedCode, in_allocation: int) -> dict[str, str]:
        """What the ranks get besides the batch script's environment."""
        handover = Handover(attempt=attempt, logged=True, code=code.digest, version=__version__)
        given = {**handover.variables(), **code_variables(self._plan, code.copy, self._environ)}
        if self._plan.is_program:
            given |= program_variables(self._plan, self._environ, self._slurm, self._job_id, in_allocation)
        return given

    def _watch(self, step: Step) -> str:
        """Run the step until it ends; return which node can't write into the run directory, if so."""
        unseen = ""
        # the first message of each kind counts: a thousand nodes that fail must not mean a thousand queries of SLURM
        awaited = {ABORTED, TASKS_ENDED}
        for line in step.run():
            if (no_log := NO_LOG.match(line)) is not None:
                unseen = self._describe_unseen(no_log["rank"])
            if first := {message for message in awaited if message.match(line)}:
                awaited -= first
                self._on_bad_end()
        return unseen

    def _describe_unseen(self, rank: str) -> str:
        """Report that the node of a rank can't write into the run directory; srun names only the rank."""
        nodes = self._allocation.step_nodes
        node = nodes[0] if len(nodes) == 1 else f"the node of rank {rank}"
        remedy = "put the run directory on a file system that all nodes share"
        if len(nodes) > 1:
            remedy += f"; to find the node: python -m hpctrain doctor cluster=slurm nodes={len(nodes)}"
        return f"{node} can't write into {self._directory.path}; {remedy}"

    def _have_begun(self) -> bool:
        """Whether all ranks of an earlier attempt have begun, as their own records tell."""
        try:
            return bool(saved_step(self._directory)) or any(map(self._began, Ledger(self._directory).attempts()))
        except (OSError, HpctrainError):
            return False

    def _began(self, earlier: Attempt) -> bool:
        # the launcher records a start as well, at the end of an attempt whose ranks didn't: theirs has torch's version
        left = len(read_exit_records(self._directory.claim(earlier.attempt)))
        return earlier.torch is not None or 0 < (earlier.world_size or 0) <= left
