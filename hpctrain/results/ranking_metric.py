"""A metric by which runs are ranked."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankingMetric:
    """A metric by which runs are compared.

    Attributes:
        name: as logged, such as `eval/accuracy`.
        mode: `min` or `max`: which values are better.
    """

    name: str
    mode: str

    def loss(self, value: float) -> float:
        """The value; negated if larger values are better."""
        return value if self.mode == "min" else -value
