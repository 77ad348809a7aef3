"""The record that each rank writes when it ends, since an exit code that passed through a launcher is unreliable."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

from hpctrain.files import read_json_or_empty, write_json
from hpctrain.run.file_system import release, write_with_reserve
from hpctrain.run.reason import Reason
from hpctrain.run.record_fields import COUNT, COUNTS_BY_NAME, FLAG, TEXT, TIME, FieldType, decode

_REASON = FieldType("a reason", lambda value: TEXT.accepts(value) and value in set(Reason), Reason)
_SIGNAL = FieldType("a signal", lambda value: COUNT.accepts(value) and value in set(signal.Signals))


@dataclass(frozen=True, slots=True)
class Collectives:
    """The collectives of one rank.

    Attributes:
        begun: how many it had begun, by backend and group, such as ``nccl default_pg``.
        group: of the oldest collective that wasn't finished; empty if all were.
        operation: of that collective, such as ``all_reduce``.
        number: of that collective in its group, from 1.
    """

    begun: Annotated[Mapping[str, int], COUNTS_BY_NAME] = field(default_factory=dict)
    group: Annotated[str, TEXT] = ""
    operation: Annotated[str, TEXT] = ""
    number: Annotated[int, COUNT] = 0

    @property
    def waits_on_nccl(self) -> bool:
        """Whether the unfinished collective is one of NCCL, for whose result whatever follows on the GPU waits."""
        return self.group.startswith("nccl ")

    @property
    def description(self) -> str:
        """The unfinished one, such as ``all_reduce (collective 120 of nccl default_pg)``; empty without one."""
        return f"{self.operation} (collective {self.number} of {self.group})" if self.group else ""


_COLLECTIVES = FieldType("collectives", lambda _: True, partial(decode, Collectives))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitRecord:
    """The end of one rank.

    Attributes:
        rank: its global rank.
        host: the name of its machine.
        reason: why it ended.
        step: the last step that it completed.
        message: one line: the error, or empty.
        traceback: the formatted traceback, or empty.
        blames_peer: whether the error only shows that another rank was lost, so that the cause is probably there.
        stop_signal: number of the signal that had asked it to stop; None without one. SLURM without cgroups signals all
            processes of a rank, and the death of a child process then looks like an error of the task.
        time: epoch seconds.
        done: whether a program called `session.done()`.
        lost_lines: number of lines that its log lacks, because its file couldn't be written.
        lost_bytes: their size.
        collectives: of a rank that hung among others, as far as they are known.
    """

    rank: Annotated[int, COUNT]
    host: Annotated[str, TEXT]
    reason: Annotated[Reason, _REASON]
    step: Annotated[int, COUNT]
    message: Annotated[str, TEXT] = ""
    traceback: Annotated[str, TEXT] = ""
    blames_peer: Annotated[bool, FLAG] = False
    stop_signal: Annotated[int | None, _SIGNAL] = None
    time: Annotated[float, TIME] = 0.0
    done: Annotated[bool, FLAG] = False
    lost_lines: Annotated[int, COUNT] = 0
    lost_bytes: Annotated[int, COUNT] = 0
    collectives: Annotated[Collectives | None, _COLLECTIVES] = None

    def write(self, claim: Path) -> None:
        """Write the record into the attempt's claim.

        Raises:
            OSError: the record can't be written, even with the reserved disk space.
        """
        path = claim / f"rank_{self.rank}.json"
        write_with_reserve(claim, lambda: write_json(path, asdict(self)), rank=self.rank)
        release(claim, self.rank)


def read_exit_records(claim: Path) -> dict[int, ExitRecord]:
    """The exit records of an attempt by rank; a record that can't be read counts as absent."""
    records = (decode(ExitRecord, read_json_or_empty(path)) for path in claim.glob("rank_*.json"))
    return {record.rank: record for record in records if record is not None}


def first_cause(records: Mapping[int, ExitRecord]) -> ExitRecord | None:
    """The record that explains a failure: the earliest that doesn't blame a peer, else the earliest.

    If all blame a peer, a rank that hangs precedes those that lost it when its watchdog ended it. Of ranks that failed
    with the same error as rank zero, it is rank zero's, which has printed that error. None if no rank recorded a
    failure.
    """
    wrong = [record for record in records.values() if not record.reason.meaning.orderly]
    first = min(
        wrong,
        key=lambda record: (record.blames_peer, record.blames_peer and record.reason is not Reason.HANG, record.time),
        default=None,
    )
    zero = records.get(0)
    return zero if first is not None and zero is not None and _failed_alike(zero, first) else first


def _failed_alike(zero: ExitRecord, first: ExitRecord) -> bool:
    """Whether two ranks failed with the same error, which isn't that of a machine or of another rank."""
    failures = {(record.reason, record.message, record.blames_peer) for record in (zero, first)}
    return failures == {(Reason.FAILED, first.message, False)}
