"""End a run when a metric has stopped improving."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpctrain.callbacks.callback import Callback
from hpctrain.callbacks.training import Training
from hpctrain.config import callbacks
from hpctrain.config.checkpoint import EVAL_PREFIX
from hpctrain.errors import ConfigError
from hpctrain.phrases import counted


class EarlyStopping(Callback):
    """Ends the run after the evaluation at which a metric hasn't improved for too long.

    Args:
        patience: evaluations in a row without an improvement after which the run ends, as in Lightning and Keras.
        min_delta: an improvement is better than the best value by more than this.
        metric: name, as the evaluation returns it; None for the metric that judges the run.
        mode: `min` or `max`; None: as for the run, `min` for `loss`.

    Raises:
        ConfigError: `mode` is another word, or a number is out of range.
    """

    def __init__(
        self, patience: int = 5, min_delta: float = 0.0, metric: str | None = None, mode: str | None = None
    ) -> None:
        # a subclass, or a test, calls this with values that no configuration has checked
        callbacks.EarlyStopping(patience=patience, min_delta=min_delta, metric=metric, mode=mode)
        self.patience = patience
        self.min_delta = min_delta
        self.metric = None if metric is None else metric.removeprefix(EVAL_PREFIX)
        self.mode = mode
        self.best: float | None = None
        self.num_bad = 0
        self.restored: Mapping[str, Any] = {}

    def on_start(self, training: Training) -> None:
        """Find the metric; the values of another one are dropped."""
        is_own = self.metric is None or self.metric == training.metric
        self.mode = self.mode or (training.metric_mode if is_own else "min" if self.metric == "loss" else None)
        self.metric = self.metric or training.metric
        if self.mode is None:
            problem = f"the task doesn't define which values of {self.metric} are better"
            raise ConfigError(f"callbacks.{training.callback_name}.mode", None, problem, "set it to min or max")
        judged = {"metric": self.metric, "mode": self.mode}
        # checkpoints of earlier versions have no mode
        if any(self.restored.get(key, value) != value for key, value in judged.items()):
            self.best = None
            self.num_bad = 0

    def after_evaluation(self, training: Training, metrics: Mapping[str, float]) -> None:
        """Compare the metric with the best one."""
        if self.metric is None or self.metric not in metrics:
            problem = f"the evaluation returns {', '.join(sorted(metrics)) or 'nothing'}"
            raise ConfigError(f"callbacks.{training.callback_name}.metric", self.metric, problem, "name one of these")
        value = metrics[self.metric]
        gain = 0.0 if self.best is None else (self.best - value) * (1 if self.mode == "min" else -1)
        # NaN is never an improvement
        if (self.best is None and value == value) or gain > self.min_delta:  # noqa: PLR0124
            self.best = value
            self.num_bad = 0
            return
        self.num_bad += 1
        if self.num_bad >= self.patience:
            best = "" if self.best is None else f", the best was {self.best:.4g}"
            training.end(f"{self.metric} hasn't improved in {counted(self.num_bad, 'evaluation')}{best}")

    def state_dict(self) -> dict[str, Any]:
        """See `Callback`."""
        return {"metric": self.metric, "mode": self.mode, "best": self.best, "num_bad": self.num_bad}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Callback`."""
        self.best = state["best"]
        self.num_bad = state["num_bad"]
        self.restored = state
