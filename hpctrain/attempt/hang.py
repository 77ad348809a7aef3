"""Detect hangs, and report an attempt in which a rank hung.

`hpctrain.config.health` has the bounds. The watchdog of a training's rank (`rank.watchdog`) and the event loop of a
program's (`program.loop`) ask a `HangWatch`, and record what it finds. The timeouts of the process groups are longer
than all bounds, so that they end only what no watchdog could. The launcher, or the supervisor, reports the whole
attempt by `hang_report`.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from enum import Enum

from hpctrain.config.health import Health
from hpctrain.phrases import numbered
from hpctrain.run.exit_record import ExitRecord
from hpctrain.run.reason import Reason
from hpctrain.run.times import STARTING

PEERS_S = 3.0
"""Seconds that the other ranks get to record their own state before the first one that hangs ends, and their
connections with it. They look every `REQUESTS_EVERY_S`."""
REQUESTS_EVERY_S = 2.0
"""Seconds between a rank's looks into the run directory for a stop file and for a request for stacks."""
SIGALRM_MESSAGE = "Alarm clock"
"""What srun and shells print of a process that SIGALRM ended, as `rank.stacks.StackTimer` ends one that hangs."""
GIL_HELD = (
    "hpctrain's timer probably ended it by SIGALRM, because a call never released Python's global lock (GIL); "
    "the end of its log shows the stack"
)


class Phase(Enum):
    """A phase of a rank; a new bound is a member here, a key in `config.health`, and a kind of work of its own.

    Ranks of a program begin in `START`, and are in `TRAINING` from their first report on (`program.loop`).

    Each has the key under `health` that bounds its time without progress, the missing progress, and the kinds of work
    (`run.times.PhaseTimes`) that belong to it.
    """

    START = ("start_timeout_s", "no first step within {} of start-up", STARTING)
    TRAINING = ("hang_timeout_s", "no step for {}", ("train_s",))
    EVALUATION = ("eval_timeout_s", "no evaluated batch for {}", ("eval_s",))
    SAVING = ("save_timeout_s", "a save unfinished after {}", ("save_s",))

    @classmethod
    def of(cls, doing: str) -> Phase:
        """The phase of a rank, from the kind of work that takes its time, of which each has one."""
        return next(phase for phase in cls if doing in phase.value[2])

    def bound_s(self, health: Health) -> float:
        """Allowed seconds without progress."""
        key, _, _ = self.value
        return health.bound_s(key)

    def complaint(self, health: Health) -> str:
        """Describe the missing progress, with the bound and the key that sets it."""
        key, missing, _ = self.value
        return f"{missing.format(f'{self.bound_s(health):g} s')} (health.{key})"


class HangWatch:
    """Measures how long a rank shows no progress, by repeated updates.

    Args:
        health: the bounds.
        now: seconds on a monotonic clock.
        every_s: the usual seconds between two updates.

    Attributes:
        silence_s: seconds without progress.
    """

    def __init__(self, health: Health, now: float, every_s: float) -> None:
        self._health = health
        self._looked_at = now
        self._longest_gap_s = 2 * every_s
        self._mark: object = None
        self.silence_s = 0.0

    def update(self, phase: Phase, progress: object, now: float) -> str:
        """Describe the missing progress; empty unless the silence has reached the bound of the phase.

        Args:
            phase: of the rank.
            progress: a value that changes whenever the rank makes progress.
            now: seconds on a monotonic clock.
        """
        # a late update means that the whole process stood still, perhaps suspended by a scheduler, which isn't a hang
        elapsed = min(now - self._looked_at, self._longest_gap_s)
        self._looked_at = now
        mark = phase, progress
        self.silence_s = self.silence_s + elapsed if mark == self._mark else 0.0
        self._mark = mark
        return phase.complaint(self._health) if self.silence_s >= phase.bound_s(self._health) else ""


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
    hanging = [record for record in records.values() if record.reason is Reason.HANG]
    hanging.sort(key=lambda record: record.time)
    # A rank that hangs while it waits for others blames them. So the cause is a rank that hangs outside of a
    # collective, or one without a record of a hang: it was stuck, and at most woke up when the others ended.
    stuck = [record for record in hanging if not record.blames_peer]
    lost = sorted(record.rank for record in records.values() if record.blames_peer and record.reason is not Reason.HANG)
    # If all of them wait, one of them has left out a collective, or is at another one than the others.
    behind = [] if stuck or silent or lost else _behind(hanging)
    waiting = [record for record in hanging if record.blames_peer and record not in behind]
    first = (stuck or behind or hanging)[0]
    parts = [f"rank {first.rank} on {first.host} hangs{after and f' after step {first.step}'}: {first.message}"]
    if len(stuck) > 1:
        parts.append(f"also hanging: {numbered('rank', sorted(record.rank for record in stuck[1:]))}")
    if behind:
        parts.append(_behind_text(behind, waiting))
    if silent:
        why = "stopped, its machine gone, or stuck outside of Python"
        parts.append(f"{numbered('rank', silent)} left no exit record: {why}")
    if lost and not stuck:
        parts.append(f"{numbered('rank', lost)} reported no hang, then lost the other ranks, and may have been stuck")
    if waiting:
        waiting_ranks = numbered("rank", sorted(record.rank for record in waiting))
        who = waiting_ranks if stuck or silent or lost or behind else "every rank"
        parts.append(f"{who} waited for others{_collective_text(waiting)}")
    head = "; ".join(parts)
    return f"{head}\n{first.traceback.rstrip()}" if stuck and first.traceback else head


def _behind(waiting: Sequence[ExitRecord]) -> list[ExitRecord]:
    """The ranks that have begun the fewest collectives of the group in which another one waits, if they differ."""
    group = _group(waiting)
    counts = {record.rank: count for record in waiting if (count := _begun(record, group)) is not None}
    if len(counts) < len(waiting) or len(set(counts.values())) < 2:
        return []
    fewest = min(counts.values())
    return [record for record in waiting if counts[record.rank] == fewest]


def _behind_text(behind: Sequence[ExitRecord], ahead: Sequence[ExitRecord]) -> str:
    group = _group((*ahead, *behind))
    furthest = max(_begun(record, group) or 0 for record in ahead)
    which = numbered("rank", sorted(record.rank for record in behind))
    return (
        f"{which} began only {_begun(behind[0], group)} collectives of {group}, other ranks up to {furthest}: {which} "
        "probably skipped a collective, or called them in another order"
    )


def _group(records: Sequence[ExitRecord]) -> str:
    return next((record.collectives.group for record in records if record.collectives and record.collectives.group), "")


def _begun(record: ExitRecord, group: str) -> int | None:
    return None if record.collectives is None else record.collectives.begun.get(group)


def _collective_text(waiting: Sequence[ExitRecord]) -> str:
    descriptions = {"" if record.collectives is None else record.collectives.description for record in waiting}
    return f" in {descriptions.pop()}" if len(descriptions) == 1 and "" not in descriptions else ""
