"""The last evaluation of a run and the best one so far, kept with the attempt's exit records; scores of checkpoints."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from hpctrain.config.checkpoint import EVAL_PREFIX
from hpctrain.files import read_json_or_empty, write_json
from hpctrain.run.record_fields import COUNT, NUMBER, TEXT, FieldType, decode, finite_numbers

FILE_NAME = "evaluation.json"
MODES = ("min", "max")
_MODE = FieldType("min or max", lambda value: value in MODES)
_MEANS = FieldType("an object", lambda value: isinstance(value, dict), finite_numbers)


@dataclass(frozen=True, slots=True)
class Score:
    """A metric's value.

    Attributes:
        name: of the metric, as the task's `evaluate` names it.
        mode: `min` or `max`: which values are better.
        value: finite.
    """

    name: Annotated[str, TEXT]
    mode: Annotated[str, _MODE]
    value: Annotated[float, NUMBER]

    def __post_init__(self) -> None:
        assert self.mode in MODES
        assert math.isfinite(self.value)

    @property
    def loss(self) -> float:
        """The value; negated if larger values are better."""
        return self.value if self.mode == "min" else -self.value


_SCORE = FieldType("a score", lambda _: True, partial(decode, Score))


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRecord:
    """An evaluation, and the best one up to it.

    Attributes:
        step: completed steps.
        means: its finite values by logged name, such as `eval/loss`.
        best: the best value so far of the metric by which the run is judged; None without one.
        best_step: its step.
    """

    step: Annotated[int, COUNT]
    means: Annotated[Mapping[str, float], _MEANS]
    best: Annotated[Score | None, _SCORE] = None
    best_step: Annotated[int | None, COUNT] = None

    def write(self, claim: Path) -> None:
        """Write it into the attempt's claim; an error of the file system is ignored."""
        finite = {name: value for name, value in self.means.items() if math.isfinite(value)}
        # training doesn't depend on it, and metrics.jsonl has the values as well
        with contextlib.suppress(OSError):
            write_json(claim / FILE_NAME, {**asdict(self), "means": finite}, durable=False)


def is_evaluation(names: Iterable[str]) -> bool:
    """Return whether a record with these logged names is that of an evaluation."""
    return any(name.startswith(EVAL_PREFIX) for name in names)


def read_evaluation(claim: Path) -> EvaluationRecord | None:
    """Read the last evaluation of an attempt; None if the file is missing or unreadable."""
    record = read_json_or_empty(claim / FILE_NAME)
    # the best score without its step says nothing, nor does the step without the score
    if not COUNT.accepts(record.get("best_step")) or decode(Score, record.get("best")) is None:
        record |= {"best": None, "best_step": None}
    return decode(EvaluationRecord, record)


def best_steps(scores: Mapping[int, Score | None], count: int) -> list[int]:
    """Return the steps with the best scores, best first; ties go to the earlier step.

    Args:
        scores: by step. Only scores of the newest score's metric count: the user may have changed the run's metric.
        count: maximum number of steps to return.
    """
    scored = {step: score for step, score in scores.items() if score is not None}
    if not scored:
        return []
    newest = scored[max(scored)]
    alike = [step for step, score in scored.items() if (score.name, score.mode) == (newest.name, newest.mode)]
    return sorted(alike, key=lambda step: (scored[step].loss, step))[:count]
