"""The score of a checkpoint: one metric of the evaluation of its step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.run.record_fields import NUMBER

MODES = ("min", "max")


@dataclass(frozen=True, slots=True)
class Score:
    """A metric's value.

    Attributes:
        name: of the metric, as the task's `evaluate` names it.
        mode: `min` or `max`: which values are better.
        value: finite.
    """

    name: str
    mode: str
    value: float

    def __post_init__(self) -> None:
        assert self.mode in MODES
        assert math.isfinite(self.value)

    @property
    def loss(self) -> float:
        """The value; negated if larger values are better."""
        return self.value if self.mode == "min" else -self.value

    def as_record(self) -> dict[str, str | float]:
        """The score as JSON has it; `score_of` reads it."""
        return {"name": self.name, "mode": self.mode, "value": self.value}


def score_of(record: object) -> Score | None:
    """Return the score in a manifest; None without one."""
    if not isinstance(record, dict) or record.keys() != {"name", "mode", "value"}:
        return None
    name, mode, value = record["name"], record["mode"], record["value"]
    if mode not in MODES or not NUMBER.accepts(value):
        return None
    return Score(str(name), mode, float(value))


def best_steps(scores: Mapping[int, Score | None], count: int) -> list[int]:
    """Return the steps with the best scores, best first; ties go to the earlier step.

    Args:
        scores: by step. Only scores of the newest score's metric count: the user may have changed the run's metric.
        count: maximum number of steps to return.
    """
    known = {step: score for step, score in scores.items() if score is not None}
    if not known:
        return []
    newest = known[max(known)]
    alike = [step for step, score in known.items() if (score.name, score.mode) == (newest.name, newest.mode)]
    return sorted(alike, key=lambda step: (known[step].loss, step))[:count]
