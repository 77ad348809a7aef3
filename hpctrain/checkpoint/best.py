"""The best evaluations of a run so far."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from hpctrain.checkpoint.state import Stateful
from hpctrain.config.checkpoint import EVAL_PREFIX, Checkpoint
from hpctrain.errors import ConfigError
from hpctrain.run.directory import RunDirectory
from hpctrain.run.evaluation import Score, best_steps
from hpctrain.run.record_fields import decode


def judging_metric(policy: Checkpoint, metric: str, mode: str) -> tuple[str, str | None]:
    """Return the metric that judges the run, and its mode; None if it isn't defined which values are better.

    Args:
        policy: conf/checkpoint.
        metric: of the task.
        mode: of the task's metric.
    """
    name = policy.metric or metric
    # lower is better for any loss; the task defines the mode only for its own metric
    default_mode = mode if name == metric else "min" if name == "loss" else None
    return name, policy.metric_mode or default_mode


def resolve_keep_best(policy: Checkpoint, metric: str, mode: str, *, evaluates: bool) -> Checkpoint:
    """Return the policy with `checkpoint.keep_best=null` replaced by its number, 0 or 1.

    The login half can't resolve it: only the task shows whether the run evaluates.

    Args:
        policy: conf/checkpoint.
        metric: of the task.
        mode: of the task's metric.
        evaluates: whether the task has held-out samples.
    """
    if policy.keep_best is not None:
        return policy
    return replace(policy, keep_best=int(evaluates and judging_metric(policy, metric, mode)[1] is not None))


class Scored(NamedTuple):
    """An evaluated step and its score."""

    step: int
    score: Score


class Best(Stateful):
    """Scores evaluations by one metric, and remembers the best ones; the same on every rank.

    Scores are in manifests, where `status` finds the best of the remaining checkpoints without torch. The state has the
    best so far, too: a resumed run ranks its evaluations like an uninterrupted one, whatever retention has removed.

    Attributes:
        top: the best evaluation so far; None before the first.

    Args:
        name: of the metric, as the task's `evaluate` names it.
        mode: `min` or `max`: which values are better.
        keep: how many checkpoints are kept for their scores.
        required: whether each evaluation must return the metric.
        directory: of the run: a score whose checkpoint is gone no longer keeps the next best from being saved; None
            for no such comparison.
    """

    def __init__(
        self, name: str, mode: str, keep: int, *, required: bool = False, directory: RunDirectory | None = None
    ) -> None:
        self._name = name
        self._mode = mode
        self._keep = keep
        self._required = required
        self._directory = directory
        self._scores: dict[int, Score] = {}
        self._last: Scored | None = None
        self.top: Scored | None = None

    @classmethod
    def configured(
        cls, policy: Checkpoint, metric: str, mode: str, directory: RunDirectory | None = None
    ) -> Best | None:
        """Build it from the configuration; None if neither it nor the task defines which values are better.

        Args:
            policy: conf/checkpoint.
            metric: of the task.
            mode: of the task's metric.
            directory: of the run.

        Raises:
            ConfigError: the configuration keeps the best, but doesn't define which values are better.
        """
        name, chosen = judging_metric(policy, metric, mode)
        if chosen is not None:
            keep = 1 if policy.keep_best is None else policy.keep_best
            return cls(name, chosen, keep, required=bool(policy.keep_best), directory=directory)
        if policy.keep_best:
            problem = f"the task doesn't define which values of {name} are better"
            metrics = " or ".join(dict.fromkeys((metric, "loss")))
            remedy = f"set it to min or max, or checkpoint.metric to {metrics}, whose mode is known"
            raise ConfigError("checkpoint.metric_mode", None, problem, remedy)
        return None

    def update(self, step: int, means: Mapping[str, float]) -> bool:
        """Add an evaluation, and return whether it is among the best so far; a NaN or infinite value never is.

        Args:
            step: completed steps.
            means: by logged name, such as `eval/loss`.

        Raises:
            ConfigError: the metric is required, but the evaluation doesn't return it.
        """
        value = means.get(f"{EVAL_PREFIX}{self._name}")
        if value is None:
            if self._required:
                metrics = ", ".join(sorted(name.removeprefix(EVAL_PREFIX) for name in means)) or "nothing"
                raise ConfigError(
                    "checkpoint.metric", self._name, f"the evaluation returns {metrics}", "name one of these"
                )
            return False
        if not math.isfinite(value):
            return False
        score = Score(self._name, self._mode, value)
        self._last = Scored(step, score)
        if self.top is None or score.loss < self.top.score.loss:
            self.top = self._last
        self._remember({**self._scores, step: score})
        return step in self._scores

    def score_at(self, step: int) -> Score | None:
        """Return the score of ``step`` if it is the last evaluated step; else None."""
        return self._last.score if self._last is not None and self._last.step == step else None

    def state(self) -> dict[str, Any]:
        """Return the best values so far by step."""
        values = {step: score.value for step, score in self._scores.items()}
        best = None if self.top is None else (self.top.step, self.top.score.value)
        return {"best": {"metric": (self._name, self._mode), "values": values, "best": best}}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Restore the best values; drop those of another metric."""
        state = saved.get("best", {})
        steps = None if self._directory is None else self._directory.checkpoint_steps()
        self._scores = {}
        self._last = None
        self.top = None
        if tuple(state.get("metric", ())) == (self._name, self._mode):
            values = {step: value for step, value in state["values"].items() if steps is None or step in steps}
            self._remember({step: Score(self._name, self._mode, value) for step, value in values.items()})
            if state.get("best") is not None:  # absent from the checkpoints of earlier versions
                step, value = state["best"]
                self.top = Scored(step, Score(self._name, self._mode, value))
            # an attempt that trains no step saves this one again, without evaluating it
            if (score := decode(Score, saved.get("score"))) is not None:
                self._last = Scored(saved["step"], score)

    def _remember(self, scores: Mapping[int, Score]) -> None:
        self._scores = {step: scores[step] for step in best_steps(scores, self._keep)}
