"""The best evaluations of a run so far."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hpctrain.config.checkpoint import Checkpoint
from hpctrain.errors import ConfigError
from hpctrain.run.score import Score, best_steps


def best_for(policy: Checkpoint, metric: str, mode: str) -> Best | None:
    """Who judges the evaluations of a run; None where nobody says which values are better, and nobody asks.

    Args:
        policy: conf/checkpoint.
        metric: the task's own.
        mode: of the task's own.

    Raises:
        ConfigError: the best are to be kept, and nobody says which values are better.
    """
    name = policy.metric or metric
    known = mode if name == metric else "min" if name == "loss" else None
    chosen = policy.metric_mode or known
    if chosen is not None:
        return Best(name, chosen, policy.keep_best)
    if policy.keep_best:
        why = f"nobody says which values of {name} are better"
        raise ConfigError("checkpoint.metric_mode", None, why, "set it to min or max")
    return None


class Best:
    """Judges evaluations by one metric, and remembers the best; the same on every rank.

    Args:
        name: of the metric, as the task's `evaluate` calls it.
        mode: `min` or `max`: which values are better.
        keep: so many are remembered; 0 remembers none.
    """

    def __init__(self, name: str, mode: str, keep: int) -> None:
        self._name, self._mode, self._keep = name, mode, keep
        self._scores: dict[int, Score] = {}
        self._last: tuple[int, Score] | None = None

    def judge(self, step: int, means: Mapping[str, float]) -> bool:
        """Take an evaluation in; whether it is among the best so far. What isn't finite never is.

        Args:
            step: completed steps.
            means: by name as it is logged, `eval/loss` and so on.

        Raises:
            ConfigError: the evaluation doesn't give the metric, and the best are to be kept.
        """
        value = means.get(f"eval/{self._name}")
        if value is None:
            if self._keep:
                given = ", ".join(sorted(name.removeprefix("eval/") for name in means)) or "nothing"
                raise ConfigError("checkpoint.metric", self._name, f"the evaluation gives {given}", "name one of these")
            return False
        if not math.isfinite(value):
            return False
        score = Score(self._name, self._mode, value)
        self._last = step, score
        candidates = {**self._scores, step: score}
        best = best_steps(candidates, self._keep)
        self._scores = {kept: candidates[kept] for kept in best}
        return step in best

    def at(self, step: int) -> Score | None:
        """The score of ``step``, if it is the one that was judged last."""
        return self._last[1] if self._last is not None and self._last[0] == step else None

    def state(self) -> dict[str, Any]:
        """For a checkpoint: the best values so far by step."""
        values = {step: score.value for step, score in self._scores.items()}
        return {"metric": (self._name, self._mode), "values": values}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave; what was judged by another metric counts no more."""
        self._scores, self._last = {}, None
        if tuple(state.get("metric", ())) != (self._name, self._mode):
            return
        scores = {step: Score(self._name, self._mode, value) for step, value in state["values"].items()}
        self._scores = {step: scores[step] for step in best_steps(scores, self._keep)}
