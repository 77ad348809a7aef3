"""Find out why SLURM is ending a job, or why it ended one.

Its ranks and its supervisor ask while it ends, and the next attempt afterwards. While it ends, the signal that a
process received counts, and SLURM's record at that moment. Each case was observed on SLURM 22.05, with the record read
right after the signal. Elapsed time is never the evidence: SLURM sends the warning signal early and kills late.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hpctrain.files import read_json_or_empty, write_json
from hpctrain.run.reason import Reason
from hpctrain.scheduler.job import JobState, SlurmJob
from hpctrain.scheduler.slurm import Slurm

FILE_NAME = "termination.json"
USER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)

TIME_IS_UP = "the time limit was reached"
BY_RECORD = {
    "TimeLimit": (Reason.TIME_LIMIT, TIME_IS_UP),
    "NodeDown": (Reason.NODE_FAILURE, "a node failed"),
}
"""The reason, with its words, by the field `Reason` of SLURM's record, for a job that SLURM kills without a requeue.
Any other value means that a person cancelled the job."""
BY_STATE = {
    JobState.CANCELLED: Reason.CANCELLED,
    JobState.TIMEOUT: Reason.TIME_LIMIT,
    JobState.DEADLINE: Reason.TIME_LIMIT,
    JobState.PREEMPTED: Reason.PREEMPTED,
    JobState.OUT_OF_MEMORY: Reason.OUT_OF_MEMORY,
    JobState.NODE_FAIL: Reason.NODE_FAILURE,
    JobState.BOOT_FAIL: Reason.NODE_FAILURE,
    JobState.FAILED: Reason.INFRASTRUCTURE,
}
"""The reason of an attempt's end, by the last state of its job."""


@dataclass(frozen=True, slots=True)
class Termination:
    """The end of a job by SLURM, under way or over; without SLURM, the signal that stopped the ranks.

    Attributes:
        reason: why SLURM ends the job; None if its record doesn't explain the signal, which then came from a person, or
            from srun after another rank died.
        evidence: what SLURM did, in words, with the signal.
        deadline: epoch seconds at which SLURM will kill the job; None if it is unknown.
        requeued: whether SLURM has already put the job back into the queue.
        killing: whether SLURM is killing the job's processes; if not, they have some time left.
        record: the fields of SLURM's record from which the reason follows, for a log; empty without an answer.
        certain: whether the reason is certain, or only likely, as for some jobs that have ended.
    """

    reason: Reason | None
    evidence: str
    deadline: float | None = None
    requeued: bool = False
    killing: bool = False
    record: str = ""
    certain: bool = True

    @property
    def needs_requeue(self) -> bool:
        """Whether the batch script has to requeue the job before SLURM kills it."""
        return not self.requeued and self.reason is not None and self.reason.meaning.batch_script_requeues

    @property
    def logged(self) -> str:
        """The evidence with SLURM's fields."""
        return "; ".join(filter(None, (self.evidence, self.record)))

    @classmethod
    def of_ended(cls, state: JobState) -> Termination | None:
        """The termination of a job whose last state this is; None if the state doesn't show a reason."""
        if state not in BY_STATE:
            return None
        # FAILED means only that something went wrong
        certain = state is not JobState.FAILED
        return cls(BY_STATE[state], f"SLURM's record has {state.value}", certain=certain)

    @classmethod
    def read(cls, claim: Path) -> Termination | None:
        """Read the termination that the attempt's supervisor recorded; None if there is none with a known reason."""
        try:
            termination = cls.from_json(read_json_or_empty(claim / FILE_NAME))
        except (KeyError, TypeError, ValueError):  # another version of hpctrain may know other reasons and fields
            return None
        return None if termination.reason is None else termination

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Termination:
        """Inverse of `as_json`.

        Raises:
            KeyError, TypeError, ValueError: the record has other fields, or an unknown reason.
        """
        reason = record["reason"]
        return cls(**{**record, "reason": None if reason is None else Reason(reason)})

    def as_json(self) -> dict[str, Any]:
        """All fields but `certain` as JSON types: SLURM is certain of how it is ending a job that still runs."""
        fields = asdict(self)
        del fields["certain"]
        return fields

    def write(self, claim: Path) -> None:
        """Write it into the attempt's claim: for its ranks, and the next attempt if this one can't record its end."""
        write_json(claim / FILE_NAME, self.as_json())


def ask_termination(
    slurm: Slurm,
    job_id: str,
    received: int | None,
    *,
    restarts: int,
    within_s: float = 0.0,
    nodes: Sequence[str] = (),
    since: float = 0.0,
) -> Termination:
    """Ask SLURM why it is ending a job.

    Args:
        slurm: is asked, once.
        job_id: of the job.
        received: number of the signal that a process of the job received; None if it is unknown.
        restarts: how often the job had been requeued when this attempt began.
        within_s: the time limit counts as reached so many seconds before.
        nodes: of the job, about which SLURM is asked if one of them may have failed; empty not to ask.
        since: epoch seconds from which on their failure counts.

    Returns:
        The answer; without a `record` if SLURM doesn't know the job.

    Raises:
        SchedulerError: SLURM doesn't answer.
    """
    record = slurm.show(job_id)
    termination = diagnose(received, record, restarts=restarts, now=time.time() + within_s)
    # the job of a dead node looks like one that was preempted without grace time
    in_doubt = record is not None and termination.requeued and record.preempt_time is None
    if nodes and (in_doubt or termination.reason is Reason.NODE_FAILURE):
        failed = slurm.failed_nodes(nodes, since)
        if failed:
            evidence = f"{' '.join(failed)} failed; {termination.evidence}"
            return replace(termination, reason=Reason.NODE_FAILURE, evidence=evidence)
    return termination


def diagnose(received: int | None, record: SlurmJob | None, *, restarts: int, now: float) -> Termination:
    """Find out why SLURM is ending a job.

    Args:
        received: number of the signal; None if this process received none.
        record: SLURM's record of the job, read after the signal; None if SLURM can't be reached.
        restarts: how often the job had been requeued when this attempt began.
        now: epoch seconds.
    """
    name = "" if received is None else signal.Signals(received).name
    suffix = name and f" ({name})"
    if record is None:
        # a user signal is almost always SLURM's warning before the time limit
        reason = Reason.TIME_LIMIT if received in USER_SIGNALS else None
        return Termination(reason, f"SLURM didn't answer{suffix}")
    killing = record.state is JobState.COMPLETING or record.state.is_finished or record.state.is_pending
    # While the job runs, a higher count doesn't prove a requeue: Restarts may have differed from SLURM_RESTART_COUNT
    # since the job began.
    is_counted = killing and record.restarts is not None and record.restarts > restarts
    # a job whose batch script SLURM takes for not started is back in the queue too, without being counted or cancelled
    requeued = is_counted or record.state.is_pending
    fields = _fields(record)
    if record.preempt_time is not None or requeued:
        # once SLURM is killing the job, EndTime isn't the deadline: the kill comes KillWait seconds after the signal
        deadline = None if killing else record.end_time
        did = f"SLURM {'requeued' if record.preempt_time is None else 'preempted'} the job{suffix}"
        return Termination(Reason.PREEMPTED, did, deadline, requeued, killing, fields)
    if killing:
        # a preemption without grace time is handled above: SLURM increments Restarts at once
        reason, words = BY_RECORD.get(record.reason, (Reason.CANCELLED, "the job was cancelled"))
        return Termination(reason, f"{words}{suffix}", killing=True, record=fields)
    if received in USER_SIGNALS:
        return Termination(
            Reason.TIME_LIMIT, f"SLURM sent {name} before the time limit", record.end_time, record=fields
        )
    if record.end_time is not None and record.end_time <= now:
        return Termination(Reason.TIME_LIMIT, f"{TIME_IS_UP}{suffix}", record.end_time, record=fields)
    return Termination(None, f"SLURM's record names no cause{suffix}", record=fields)


def _fields(record: SlurmJob) -> str:
    times = f"PreemptTime={record.preempt_time} EndTime={record.end_time} Restarts={record.restarts}"
    return f"JobState={record.state.value} {times} Reason={record.reason or None}"
