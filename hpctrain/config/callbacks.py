"""``conf/callbacks``: what watches a training. Each file has one entry, by its own name. Owner: hpctrain.callbacks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from hpctrain.config import require


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
    """Metric of the evaluation, such as accuracy (eval/accuracy means the same); null: checkpoint.metric, or by default
    the metric of the task."""
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
