"""The record that each rank writes when it ends, since an exit code that passed through a launcher is unreliable."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.errors import RunDirectoryError
from hpctrain.files import read_json, write_json
from hpctrain.run.file_system import release_of_rank, write_with_reserve
from hpctrain.run.reason import Reason
from hpctrain.run.record_fields import COUNT, FLAG, TEXT, TIME, FieldType, describe_wrong_field

_FIELD_TYPES = {
    "rank": COUNT,
    "host": TEXT,
    "reason": TEXT,
    "step": COUNT,
    "message": TEXT,
    "traceback": TEXT,
    "blames_peer": FLAG,
    "stop_signal": FieldType("a signal", lambda value: value in set(signal.Signals)),
    "time": TIME,
    "done": FLAG,
    "lost_lines": COUNT,
    "lost_bytes": COUNT,
}
_COLLECTIVES = {
    "begun": FieldType(
        "counts by group", lambda value: isinstance(value, dict) and all(map(COUNT.accepts, value.values()))
    ),
    "group": TEXT,
    "operation": TEXT,
    "number": COUNT,
}


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

    rank: int
    host: str
    reason: Reason
    step: int
    message: str = ""
    traceback: str = ""
    blames_peer: bool = False
    stop_signal: int | None = None
    time: float = 0.0
    done: bool = False
    lost_lines: int = 0
    lost_bytes: int = 0
    collectives: Collectives | None = None

    def write(self, claim: Path) -> None:
        """Write the record into the attempt's claim.

        Raises:
            OSError: the record can't be written, even with the reserved disk space.
        """
        path = claim / f"rank_{self.rank}.json"
        write_with_reserve(claim, lambda: write_json(path, asdict(self)), rank=self.rank)
        release_of_rank(claim, self.rank)


def read_exit_records(claim: Path) -> dict[int, ExitRecord]:
    """The exit records of an attempt by rank; a record that can't be read counts as absent."""
    records: dict[int, ExitRecord] = {}
    for path in claim.glob("rank_*.json"):
        try:
            fields = {name: value for name, value in read_json(path).items() if value is not None}
            if describe_wrong_field(fields, _FIELD_TYPES, required=("rank", "host", "reason", "step")):
                continue
            collectives = Collectives.from_json(fields.get("collectives"))
            record = ExitRecord(**{**fields, "reason": Reason(fields["reason"]), "collectives": collectives})
        except (OSError, RunDirectoryError, ValueError, TypeError):
            continue
        records[record.rank] = record
    return records


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


def _failed_alike(one: ExitRecord, other: ExitRecord) -> bool:
    """Whether two ranks failed with the same error, which isn't that of a machine or of another rank."""
    failures = {(record.reason, record.message, record.blames_peer) for record in (one, other)}
    return failures == {(Reason.FAILED, other.message, False)}


@dataclass(frozen=True, slots=True)
class Collectives:
    """The collectives of one rank.

    Attributes:
        begun: how many it had begun, by backend and group, such as ``nccl default_pg``.
        group: of the oldest collective that wasn't finished; empty if all were.
        operation: of that collective, such as ``all_reduce``.
        number: of that collective in its group, from 1.
    """

    begun: Mapping[str, int] = field(default_factory=dict)
    group: str = ""
    operation: str = ""
    number: int = 0

    @classmethod
    def from_json(cls, value: object) -> Collectives | None:
        """Read the field of a record; None if it isn't there, or has another form."""
        if not isinstance(value, dict) or describe_wrong_field(value, _COLLECTIVES, required=tuple(_COLLECTIVES)):
            return None
        known: dict[str, Any] = {name: value[name] for name in _COLLECTIVES}
        return cls(**known)

    @property
    def waits_on_nccl(self) -> bool:
        """Whether the unfinished collective is one of NCCL, for whose result whatever follows on the GPU waits."""
        return self.group.startswith("nccl ")

    @property
    def description(self) -> str:
        """The unfinished one, such as ``all_reduce (collective 120 of nccl default_pg)``; empty without one."""
        return f"{self.operation} (collective {self.number} of {self.group})" if self.group else ""
