"""The last evaluation of a run and the best one so far, kept with the attempt's exit records; scores of checkpoints."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpctrain.config.checkpoint import EVAL_PREFIX
from hpctrain.files import read_json_or_empty, write_json
from hpctrain.run.directory import RunDirectory
from hpctrain.run.record_fields import COUNT, NUMBER, finite_numbers

FILE_NAME = "evaluation.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRecord:
    """An evaluation, and the best one up to it.

    Attributes:
        step: completed steps.
        means: its finite values by logged name, such as `eval/loss`.
        best: the best value so far of the metric by which the run is judged; None without one.
        best_step: its step.
    """

    step: int
    means: Mapping[str, float] = field(default_factory=dict)
    best: Score | None = None
    best_step: int | None = None

    def write(self, claim: Path) -> None:
        """Write it into the attempt's claim; an error of the file system is ignored."""
        finite = {name: value for name, value in self.means.items() if math.isfinite(value)}
        best = None if self.best is None else self.best.as_record()
        record = {"step": self.step, "means": finite, "best": best, "best_step": self.best_step}
        # training doesn't depend on it, and metrics.jsonl has the values as well
        with contextlib.suppress(OSError):
            write_json(claim / FILE_NAME, record, durable=False)


def is_evaluation(names: Iterable[str]) -> bool:
    """Return whether a record with these logged names is that of an evaluation."""
    return any(name.startswith(EVAL_PREFIX) for name in names)


def last_evaluation(directory: RunDirectory, claims: Sequence[int] | None = None) -> EvaluationRecord | None:
    """Read the newest evaluation that any attempt recorded.

    Args:
        directory: of the run.
        claims: the attempts that claimed it, if they are known already; oldest first.
    """
    claims = directory.claimed_attempts() if claims is None else claims
    found = (_read(directory.attempt(attempt)) for attempt in reversed(claims))
    return next((evaluation for evaluation in found if evaluation is not None), None)


def _read(claim: Path) -> EvaluationRecord | None:
    record = read_json_or_empty(claim / FILE_NAME)
    step, means, best_step = record.get("step"), record.get("means"), record.get("best_step")
    if not isinstance(step, int) or not COUNT.accepts(step) or not isinstance(means, dict):
        return None
    best = score_of(record.get("best")) if COUNT.accepts(best_step) else None
    best_step = None if best is None else best_step
    return EvaluationRecord(step=step, means=finite_numbers(means), best=best, best_step=best_step)


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
