"""What one rank found out about its own steps; small, to be gathered at rank zero."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

OWN = ("data", "forward", "backward")
"""The parts of a step in which a rank waits for no other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """The steps of one rank, on the mean over those that were timed.

    Attributes:
        rank: in the world.
        host: its machine.
        steps_timed: how many were.
        parts: seconds per step by part of a step (`hpctrain.train.profiling.timed_step`).
        memory_peak_bytes: the most that was in use.
        growth_bytes: by which memory grows with each step; 0 where it doesn't.
        syncs: places in the task's code that made the host wait for the GPU, and how often per step.
    """

    rank: int
    host: str
    steps_timed: int = 0
    parts: Mapping[str, float] = field(default_factory=dict)
    memory_peak_bytes: int = 0
    growth_bytes: float = 0.0
    syncs: Mapping[str, float] = field(default_factory=dict)

    @property
    def own_s(self) -> float:
        """Seconds per step before the gradient sync."""
        return sum(self.parts.get(part, 0.0) for part in OWN)

    @property
    def step_s(self) -> float:
        """Seconds per step."""
        return sum(self.parts.values())

    def share(self, part: str) -> float:
        """Of a part in the step."""
        return self.parts.get(part, 0.0) / self.step_s if self.step_s > 0 else 0.0
