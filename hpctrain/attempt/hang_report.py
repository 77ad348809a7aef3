"""Which rank a hang points at: the report on an attempt in which at least one rank recorded a hang."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence

from hpctrain.phrases import numbered
from hpctrain.run.exit_record import ExitRecord
from hpctrain.run.reason import Reason

SIGALRM_MESSAGE = "Alarm clock"
"""What srun and shells print of a process that SIGALRM ended, as `worker.stack_timer` ends one that hangs."""
GIL_HELD = (
    "hpctrain's timer probably ended it by SIGALRM, because a call never released Python's global lock (GIL); "
    "the end of its log shows the stack"
)


def alarm_complaint(codes: Sequence[int | None]) -> str:
    """Describe the ranks of this machine that ended by SIGALRM; empty if none did.

    Args:
        codes: by rank, the exit code; None for a rank that the launcher killed.
    """
    ended = [rank for rank, code in enumerate(codes) if code == -signal.SIGALRM]
    return f"{numbered('rank', ended)}: {SIGALRM_MESSAGE}" if ended else ""


def hang_report(records: Mapping[int, ExitRecord], silent: Sequence[int], after: str) -> str:
    """Describe an attempt in which at least one rank recorded a hang; the first line is a summary.

    Args:
        records: exit records by rank.
        silent: the ranks without an exit record.
        after: after which step, in words; empty if that is unknown.
    """
    hanging = sorted((one for one in records.values() if one.reason is Reason.HANG), key=lambda one: one.time)
    # A rank that hangs while it waits for others blames them. So the cause is a rank that hangs outside of a
    # collective, or one without a record of a hang: it was stuck, and at most woke up when the others ended.
    stuck = [one for one in hanging if not one.blames_peer]
    lost = sorted(one.rank for one in records.values() if one.blames_peer and one.reason is not Reason.HANG)
    # If all of them wait, one of them has left out a collective, or is at another one than the others.
    behind = [] if stuck or silent or lost else _behind(hanging)
    waiting = [one for one in hanging if one.blames_peer and one not in behind]
    first = (stuck or behind or hanging)[0]
    parts = [f"rank {first.rank} on {first.host} hangs{after and f' after step {first.step}'}: {first.message}"]
    if len(stuck) > 1:
        parts.append(f"also hanging: {numbered('rank', sorted(one.rank for one in stuck[1:]))}")
    if behind:
        parts.append(_behind_text(behind, waiting))
    if silent:
        why = "stopped, its machine gone, or stuck outside of Python"
        parts.append(f"{numbered('rank', silent)} left no exit record: {why}")
    if lost and not stuck:
        parts.append(f"{numbered('rank', lost)} saw no hang and then lost the others, perhaps after being stuck")
    if waiting:
        named = numbered("rank", sorted(one.rank for one in waiting))
        who = named if stuck or silent or lost or behind else "every rank"
        parts.append(f"{who} waited for others{_collective_text(waiting)}")
    head = "; ".join(parts)
    return f"{head}\n{first.traceback.rstrip()}" if stuck and first.traceback else head


def _behind(waiting: Sequence[ExitRecord]) -> list[ExitRecord]:
    """The ranks that have begun the fewest collectives of the group in which another one waits, if they differ."""
    group = _group(waiting)
    counts = {one.rank: count for one in waiting if (count := _begun(one, group)) is not None}
    if len(counts) < len(waiting) or len(set(counts.values())) < 2:
        return []
    fewest = min(counts.values())
    return [one for one in waiting if counts[one.rank] == fewest]


def _behind_text(behind: Sequence[ExitRecord], ahead: Sequence[ExitRecord]) -> str:
    group = _group((*ahead, *behind))
    most = max(_begun(one, group) or 0 for one in ahead)
    which = numbered("rank", sorted(one.rank for one in behind))
    return (
        f"{which} began only {_begun(behind[0], group)} collectives of {group}, other ranks up to {most}: {which} "
        "probably skipped a collective, or called them in another order"
    )


def _group(records: Sequence[ExitRecord]) -> str:
    return next((one.collectives.group for one in records if one.collectives and one.collectives.group), "")


def _begun(record: ExitRecord, group: str) -> int | None:
    return None if record.collectives is None else record.collectives.begun.get(group)


def _collective_text(waiting: Sequence[ExitRecord]) -> str:
    found = {"" if one.collectives is None else one.collectives.description for one in waiting}
    return f" in {found.pop()}" if len(found) == 1 and "" not in found else ""
