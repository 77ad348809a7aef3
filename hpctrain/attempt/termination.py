"""Why SLURM is ending a job, from the signal that a process got and SLURM's record of the job at that moment.

Each case was seen on SLURM 22.05, with the record read while the signal's flag was up. Seconds are never the evidence:
the warning signal comes early and the kill comes late.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import RunDirectoryError
from hpctrain.files import read_json, write_json
from hpctrain.run.reason import Reason
from hpctrain.scheduler.job import JobRecord, JobState

FILE_NAME = "termination.json"
USER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)

ENDED_FOR = {"TimeLimit": Reason.TIME_LIMIT, "NodeDown": Reason.NODE_FAILURE}
"""By the Reason in the record of a job that ends without being requeued; any other one means that a person ended it."""


@dataclass(frozen=True, slots=True)
class Termination:
    """What SLURM is doing to the job.

    Attributes:
        reason: why it ends the job; None where its record doesn't explain the stop: the signal came from a person, or
            from srun after the death of another rank.
        evidence: what the reason follows from, in one line.
        deadline: epoch seconds at which SLURM will kill the job; None where it is unknown.
        requeued: SLURM has put the job back into the queue already.
        killing: SLURM is killing the job's processes; otherwise they have some time left.
    """

    reason: Reason | None
    evidence: str
    deadline: float | None = None
    requeued: bool = False
    killing: bool = False

    @classmethod
    def read(cls, claim: Path) -> Termination | None:
        """Read what the attempt's batch script could still write down; None where it could not."""
        try:
            record = read_json(claim / FILE_NAME)
            return cls(Reason(record["reason"]), str(record["evidence"]))
        except (OSError, RunDirectoryError, KeyError, ValueError):
            return None

    def write(self, claim: Path) -> None:
        """Leave it in the attempt's claim, for the next attempt, should this process not live to record the end."""
        write_json(claim / FILE_NAME, {"reason": self.reason, "evidence": self.evidence})


def diagnose(received: int | None, record: JobRecord | None, *, restarts: int, now: float) -> Termination:
    """Find out why SLURM is ending a job.

    Args:
        received: number of the signal; None where this process got none.
        record: the job, asked for after the signal; None where SLURM can't be asked.
        restarts: how often the job had been requeued when this attempt began.
        now: epoch seconds.
    """
    name = "no signal here" if received is None else signal.Signals(received).name
    if record is None:
        # SLURM sends a user signal before a time limit, and hardly anybody else does
        reason = Reason.TIME_LIMIT if received in USER_SIGNALS else None
        return Termination(reason, f"{name}; SLURM could not be asked")
    requeued = record.restarts is not None and record.restarts > restarts
    killing = record.state is JobState.COMPLETING or record.state.is_finished or record.state.is_pending
    evidence = f"{name}; JobState={record.state.value} PreemptTime={record.preempt_time} EndTime={record.end_time}"
    if record.preempt_time is not None or requeued:
        # the EndTime of a job that is being killed is another one: the kill comes KillWait seconds after the signal
        return Termination(Reason.PREEMPTED, evidence, None if killing else record.end_time, requeued, killing)
    if killing:
        # not a preemption without grace time: that counts one more restart at once
        reason = ENDED_FOR.get(record.reason, Reason.CANCELLED)
        return Termination(reason, f"{evidence} Reason={record.reason or None}", killing=True)
    if received in USER_SIGNALS or (record.end_time is not None and record.end_time <= now):
        return Termination(Reason.TIME_LIMIT, evidence, record.end_time)
    return Termination(None, evidence)
