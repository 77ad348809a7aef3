"""Whether SLURM takes the job away, as its batch script can learn it: the ranks may be too dead to tell."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.attempt.termination import Cause, diagnose
from hpctrain.errors import RunDirectoryError
from hpctrain.files import read_json, write_json
from hpctrain.run.directory import RunDirectory
from hpctrain.run.reason import Reason
from hpctrain.scheduler.slurm import Slurm

FILE_NAME = "taken_away.json"


@dataclass(frozen=True, slots=True)
class TakenAway:
    """What SLURM does to the job.

    Attributes:
        reason: of the attempt's end that follows from it.
        evidence: in one line.
        killing: its processes are being killed; otherwise they have some time left.
        requeued: it is back in the queue already.
    """

    reason: Reason
    evidence: str
    killing: bool = False
    requeued: bool = False

    @classmethod
    def ask(
        cls,
        slurm: Slurm,
        job_id: str,
        nodes: Sequence[str],
        *,
        restarts: int,
        since: float,
        received: int | None = None,
    ) -> TakenAway | None:
        """Ask SLURM; None where it lets the job run.

        Args:
            slurm: who is asked.
            job_id: of the job.
            nodes: that it has.
            restarts: how often it had been requeued when this allocation began.
            since: epoch seconds at which the attempt began.
            received: number of the signal that a rank got, if it is known.

        Raises:
            SchedulerError: SLURM doesn't answer.
        """
        record = slurm.show(job_id)
        if record is None:
            return None
        found = diagnose(received, record, restarts=restarts, now=time.time())
        if found.cause is Cause.UNKNOWN:
            return None
        reason, evidence = Reason(found.cause.value), found.evidence
        # a dead node's job looks like one that was preempted without grace time
        in_doubt = found.requeued and record.preempt_time is None
        failed = slurm.failed_nodes(nodes, since) if in_doubt or reason is Reason.NODE_FAILURE else ()
        if failed:
            reason, evidence = Reason.NODE_FAILURE, f"{' '.join(failed)} failed; {evidence}"
        return cls(reason, evidence, found.ending, found.requeued)

    @classmethod
    def read(cls, claim: Path) -> TakenAway | None:
        """What an attempt's batch script still wrote down; None where it didn't."""
        try:
            record = read_json(claim / FILE_NAME)
            return cls(Reason(record["reason"]), str(record["evidence"]))
        except (OSError, RunDirectoryError, KeyError, ValueError):
            return None

    def write(self, claim: Path) -> None:
        """Leave word for whoever closes the attempt, should this process not live to do it."""
        write_json(claim / FILE_NAME, {"reason": self.reason.value, "evidence": self.evidence})


def cancelled_by_user(directory: RunDirectory, since: float) -> bool:
    """Whether `python -m hpctrain cancel` was typed for the run after a moment, in epoch seconds."""
    last = next(reversed(directory.job_records()), {})
    when = last.get("time")
    return bool(last.get("cancelled")) and isinstance(when, int | float) and when >= since
