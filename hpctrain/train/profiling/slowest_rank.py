"""Which rank is the slowest, from one gathering of the ranks' reports to the next."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.train.profiling.measurements import RankReport, Slowest, slowest_of

LEAST_STEPS = 3
"""Timed steps of each rank in a stretch; a single slow step says little of a rank."""


class SlowestRank:
    """Follows the slowest rank over time.

    A stretch lasts from one gathering to the next, or longer, until each rank has timed `LEAST_STEPS` in it.
    """

    def __init__(self) -> None:
        self._before: Sequence[RankReport] = ()
        self._found: Slowest | None = None

    def add(self, reports: Sequence[RankReport]) -> None:
        """Add the reports that were gathered, in rank order."""
        stretch = reports
        if self._before:
            stretch = [now.since(before) for before, now in zip(self._before, reports, strict=True)]
        if any(report.steps_timed < LEAST_STEPS for report in stretch):
            return
        self._before = reports
        self._found = slowest_of(stretch) or self._found

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of the newest stretch; each is returned once, and empty without a new one."""
        found, self._found = self._found, None
        if found is None:
            return {}
        return {"throughput/slowest_rank": found.report.rank, "throughput/slowest_ratio": found.ratio}
