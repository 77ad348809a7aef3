"""The pause of a run that `trainer.pause_at_step` asks for."""

from __future__ import annotations

from collections.abc import Iterable

from hpctrain.run.ledger import Attempt
from hpctrain.run.reason import Reason


def paused_step(attempts: Iterable[Attempt]) -> int | None:
    """The last step at which a run has paused; None if it never has."""
    return max((one.end_step or 0 for one in attempts if one.reason is Reason.PAUSED), default=None)


def next_pause(attempts: Iterable[Attempt], pause_at_step: int | None) -> int | None:
    """The step after which a run pauses.

    A run that has paused there trains on when it is resumed. One that was killed before its pause was recorded pauses
    again, at once.

    Args:
        attempts: of the run so far.
        pause_at_step: as configured.

    Returns:
        The step; None if no pause is asked for, or the run has paused at this step, or after it.
    """
    last = paused_step(attempts)
    return pause_at_step if pause_at_step is None or last is None or last < pause_at_step else None


def end_of(last: Attempt, pause_at_step: int | None) -> Reason | None:
    """Why nothing is left to do for a run: completed, or paused where its configuration asks for it; else None.

    Args:
        last: its newest attempt.
        pause_at_step: as configured; a later one than that at which the run has paused lets it continue.
    """
    if last.reason is Reason.PAUSED and pause_at_step is not None and next_pause([last], pause_at_step) is None:
        return last.reason
    return last.reason if last.reason is Reason.COMPLETED else None
