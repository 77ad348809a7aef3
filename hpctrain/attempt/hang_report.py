"""What a user reads of a hang: which rank, and where it stood, as far as the ranks' own words tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpctrain.phrases import listed
from hpctrain.run.exit_record import ExitRecord
from hpctrain.run.reason import Reason


def hang_report(records: Mapping[int, ExitRecord], silent: Sequence[int]) -> str:
    """The report of an attempt in which at least one rank recorded a hang; its first line stands alone.

    A rank whose watchdog saw it wait for others blames them. So the cause is sought first in a rank that hangs outside
    of a collective, then in one that left no word, or whose watchdog saw nothing: both stood still, and woke up when
    the others were ended.

    Args:
        records: of all ranks that left one.
        silent: the ranks that didn't.
    """
    hanging = sorted((one for one in records.values() if one.reason is Reason.HANG), key=lambda one: one.time)
    stuck = [one for one in hanging if not one.blames_peer]
    waiting = sorted(one.rank for one in hanging if one.blames_peer)
    lost = sorted(one.rank for one in records.values() if one.blames_peer and one.reason is not Reason.HANG)
    speaker = (stuck or hanging)[0]
    said = f"rank {speaker.rank} on {speaker.host} hangs after step {speaker.step}: {speaker.message}"
    found = []
    if len(stuck) > 1:
        found.append(f"so does rank {listed(sorted(one.rank for one in stuck[1:]))}")
    if silent:
        found.append(f"rank {listed(silent)} left no word: stopped, its machine gone, or stuck outside of Python")
    if lost and not stuck:
        found.append(f"rank {listed(lost)} saw no hang and then lost the others: it may have stood still")
    if waiting and (stuck or silent or lost):
        found.append(f"rank {listed(waiting)} waited for others")
    elif waiting:
        found.append("every rank waited for others")
    head = "; ".join([said, *found])
    return f"{head}\n{speaker.traceback.rstrip()}" if stuck and speaker.traceback else head
