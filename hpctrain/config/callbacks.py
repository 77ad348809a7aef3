"""``conf/callbacks``: what watches a training. Each file has one entry, by its own name. Owner: hpctrain.callbacks."""

from __future__ import annotations

import ast
import difflib
import re
from dataclasses import dataclass
from typing import Annotated

from hpctrain.config import require
from hpctrain.config.signature import unfit
from hpctrain.errors import ConfigError

BASE = "hpctrain.callbacks.callback.Callback"
"""The class that callbacks derive from."""
HOOKS = (
    "on_start",
    "before_step",
    "after_backward",
    "after_step",
    "after_evaluation",
    "after_save",
    "on_stop",
    "on_end",
)
"""The methods that the training calls."""
ARGUMENTS = {"after_evaluation": ("training", "metrics")}
"""What hooks are called with, where it isn't the training alone."""


@dataclass(kw_only=True, slots=True)
class EarlyStopping(require.Checked):
    """End the run when a metric has stopped improving."""

    prefix = "callbacks.early_stopping."

    _target_: str = "hpctrain.callbacks.early_stopping.EarlyStopping"
    """Class to instantiate."""
    patience: Annotated[int, require.at_least(1)] = 5
    """Evaluations in a row without an improvement after which the run ends."""
    min_delta: Annotated[float, require.at_least(0)] = 0.0
    """An improvement exceeds the best value so far by more than this."""
    metric: str | None = None
    """Metric of the evaluation; null: checkpoint.metric, or by default the metric of the task."""
    mode: Annotated[str | None, require.one_of("min", "max")] = None
    """Whether the lowest or the highest value is best, `min` or `max`; null: as for the run, `min` for `loss`."""


@dataclass(kw_only=True, slots=True)
class LogWeights(require.Checked):
    """Log norms, and perhaps histograms, of weights and gradients."""

    prefix = "callbacks.log_weights."

    _target_: str = "hpctrain.callbacks.log_weights.LogWeights"
    """Class to instantiate."""
    every_steps: Annotated[int, require.at_least(1)] = 100
    """Steps between records."""
    histograms: bool = True
    """Also log histograms."""
    match: str = "*"
    """Names of the parameters, with * and ?, such as encoder.*."""


@dataclass(kw_only=True, slots=True)
class LogImages(require.Checked):
    """Log held-out images with the classes that the model predicts for them, after each evaluation."""

    prefix = "callbacks.log_images."

    _target_: str = "hpctrain.callbacks.log_images.LogImages"
    """Class to instantiate."""
    num_images: Annotated[int, require.at_least(1)] = 16
    """Number of held-out images, from the first one on."""


@dataclass(kw_only=True, slots=True)
class LogText(require.Checked):
    """Log text that a language model continues, after each evaluation."""

    prefix = "callbacks.log_text."

    _target_: str = "hpctrain.callbacks.log_text.LogText"
    """Class to instantiate."""
    num_samples: Annotated[int, require.at_least(1)] = 2
    """Number of held-out samples to continue, from the first one on."""
    prompt_tokens: Annotated[int, require.at_least(1)] = 32
    """Tokens of each sample that the model gets as a prompt."""
    new_tokens: Annotated[int, require.at_least(1)] = 64
    """Tokens that the model generates."""
    temperature: Annotated[float, require.at_least(0)] = 0.8
    """Divides the logits before a token is drawn; 0: the most probable token."""


@dataclass(kw_only=True, slots=True)
class AverageWeights(require.Checked):
    """Average the weights of several steps into averaged.pt, which init_from reads (Izmailov et al., 2018)."""

    prefix = "callbacks.average_weights."

    _target_: str = "hpctrain.callbacks.average_weights.AverageWeights"
    """Class to instantiate."""
    start_fraction: Annotated[float, require.half_open(0, 1)] = 0.75
    """Fraction of the run, from 0 to 1, after which the averaging begins."""
    every_steps: Annotated[int, require.at_least(1)] = 1
    """Steps from one set of weights in the average to the next."""
    num_last: Annotated[int | None, require.at_least(1)] = None
    """Average only this many of the newest weights, all of which are kept in memory; null: all."""


def cant_be_called(key: str, target: str, hook: str, why: str) -> ConfigError:
    """Return the error for a hook with other arguments."""
    arguments = ", ".join(("self", *ARGUMENTS.get(hook, ("training",))))
    problem = f"its {hook} can't be called: {why}"
    return ConfigError(f"{key}._target_", target, problem, f"write def {hook}({arguments})")


def wrong_arguments(key: str, target: str, method: ast.FunctionDef) -> ConfigError | None:
    """Return the error for a hook that doesn't take its arguments, as its source shows them; None for any other."""
    if method.name not in HOOKS:
        return None
    why = unfit(method, 1 + len(ARGUMENTS.get(method.name, ("training",))))
    return None if why is None else cant_be_called(key, target, method.name, why)


def not_a_callback(key: str, target: str) -> ConfigError:
    """Return the error for a class that isn't a callback."""
    problem = "is not a subclass of hpctrain.callbacks.Callback"
    return ConfigError(f"{key}._target_", target, problem, "derive the class from it")


def not_a_hook(key: str, target: str, method: str) -> ConfigError | None:
    """Return the error for a method that looks like a hook and isn't one; None for any other.

    Args:
        key: full name of the callback's entry.
        target: its class.
        method: name of a method.
    """
    if method in HOOKS or not re.match("(on|before|after)_", method):
        return None
    (near,) = difflib.get_close_matches(method, HOOKS, n=1, cutoff=0)
    problem = f"has {method}, which is not a hook and would never be called"
    remedy = f"did you mean {near}? The hooks are {', '.join(HOOKS)}; begin any other method's name with _"
    return ConfigError(f"{key}._target_", target, problem, remedy)
