"""Which runs of an asha search continue to the next rung."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from hpctrain.run.reason import Reason
from hpctrain.search.journal import Decision


def pause_step(rung: int, *, min_steps: int, reduction_factor: int) -> int:
    """The step of a rung: ``min_steps`` for the first, `reduction_factor` times as many for each further one."""
    step: int = min_steps * reduction_factor**rung
    return step


def promotable(
    ends: Iterable[Decision], begun: Collection[tuple[int, int]], *, reduction_factor: int
) -> list[tuple[int, int]]:
    """Return the runs that may continue, each with the rung that it is to pass next.

    The most advanced come first, and among those the best.

    Of the runs that have passed a rung, the best one in `reduction_factor` may continue (Li et al., A System for
    Massively Parallel Hyperparameter Tuning, MLSys 2020, algorithm 2). Ties go to the lower number.

    Args:
        ends: of runs, at any rung. A run without a value counts for nothing.
        begun: run and rung of what was begun already.
        reduction_factor: at least 2.
    """
    by_rung: dict[int, list[Decision]] = {}
    for end in ends:
        if end.value is not None and end.reason in (Reason.PAUSED, Reason.COMPLETED):
            by_rung.setdefault(end.rung, []).append(end)
    found = []
    for rung, passed in sorted(by_rung.items(), reverse=True):
        best = sorted(passed, key=lambda end: (loss(end), end.run))[: len(passed) // reduction_factor]
        # a run that has completed stays among the best, and has nothing left to train
        waiting = [end.run for end in best if end.reason == Reason.PAUSED]
        found += [(run, rung + 1) for run in waiting if (run, rung + 1) not in begun]
    return found


def loss(end: Decision) -> float:
    """Return the value of a run at a rung, negated if larger values are better."""
    assert end.value is not None
    return -end.value if end.mode == "max" else end.value
