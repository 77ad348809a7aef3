"""Why a job is being stopped, from the signal and from what SLURM says of the job at that moment.

Each case was seen on SLURM 22.05 with the record read while the signal's flag was up. Seconds are never the evidence:
the warning signal and the kill both come at times of SLURM's choosing.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import StrEnum

from hpctrain.scheduler.job import JobRecord
from hpctrain.scheduler.state import JobState

USER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)


class Cause(StrEnum):
    """Who or what stops the job."""

    PREEMPTED = "preempted"
    TIME_LIMIT = "time_limit"
    CANCELLED = "cancelled"
    NODE_FAILURE = "node_failure"
    UNKNOWN = "unknown"
    """A signal from elsewhere: a person, or srun after a peer's death. Nothing is requeued for it."""


ENDED_FOR = {"TimeLimit": Cause.TIME_LIMIT, "NodeDown": Cause.NODE_FAILURE}
"""By the reason that SLURM gives for a job that ends without being requeued; any other one is a person's."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What is being done to the job.

    Attributes:
        cause: of the stop.
        deadline: epoch seconds at which SLURM will kill the job; None where it doesn't say: of a job that is ending
            already it gives another time, and the kill comes KillWait seconds after the signal.
        evidence: what it follows from, for the ledger.
        requeued: SLURM has put the job back into the queue already.
        ending: its processes are being killed.
    """

    cause: Cause
    deadline: float | None
    evidence: str
    requeued: bool = False
    ending: bool = False


def diagnose(received: int | None, record: JobRecord | None, *, restarts: int, now: float) -> Diagnosis:
    """The cause of a stop.

    Args:
        received: number of the signal; None where this rank only heard of the stop from its peers.
        record: the job, asked for after the signal; None where SLURM can't be asked.
        restarts: how often the job had been requeued when this attempt began.
        now: epoch seconds.
    """
    name = signal.Signals(received).name if received is not None else "a peer's word"
    if record is None:
        cause = Cause.TIME_LIMIT if received in USER_SIGNALS else Cause.UNKNOWN
        return Diagnosis(cause, None, f"{name}; SLURM could not be asked")
    requeued = record.restarts is not None and record.restarts > restarts
    ending = record.state is JobState.COMPLETING or record.state.is_finished or record.state.is_pending
    evidence = f"{name}; JobState={record.state.value} PreemptTime={record.preempt_time} EndTime={record.end_time}"
    if record.preempt_time is not None or requeued:
        return Diagnosis(Cause.PREEMPTED, None if ending else record.end_time, evidence, requeued, ending)
    if ending:
        # a preemption without grace time counts the requeue at once, so it is not one
        cause = ENDED_FOR.get(record.reason, Cause.CANCELLED)
        return Diagnosis(cause, None, f"{evidence} Reason={record.reason or None}", ending=True)
    if received in USER_SIGNALS:
        return Diagnosis(Cause.TIME_LIMIT, record.end_time, evidence)
    if record.end_time is not None and record.end_time <= now:
        return Diagnosis(Cause.TIME_LIMIT, record.end_time, evidence)
    return Diagnosis(Cause.UNKNOWN, None, evidence)
