"""Log held-out pictures with the classes that a model predicts for them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from hpctrain.callbacks.callback import Callback
from hpctrain.callbacks.training import Training
from hpctrain.errors import TaskError


class LogPictures(Callback):
    """Logs the first held-out pictures, and a table of their classes and the predicted ones.

    For tasks whose batches are pictures of shape [n, C, H, W] and class numbers of shape [n], and whose model returns
    logits of shape [n, num_classes].

    Args:
        number: of pictures.
    """

    def __init__(self, number: int = 16) -> None:
        self.number = number

    def after_evaluation(self, training: Training, metrics: Mapping[str, float]) -> None:  # noqa: ARG002 - of the hook
        """Predict and log, on rank zero."""
        if training.rank or (batch := training.samples(self.number)) is None:
            return
        if not isinstance(batch, list | tuple) or len(batch) != 2 or batch[0].ndim != 4 or batch[1].ndim != 1:
            raise TaskError("log_pictures expects batches (pictures [n, C, H, W], class numbers [n]) of the task")
        pictures, classes = batch
        with training.evaluating():
            probabilities = training.model(pictures).float().softmax(1).cpu()
        confidence, predicted = probabilities.max(1)
        rows = zip(range(len(classes)), classes.tolist(), predicted.tolist(), confidence.tolist(), strict=True)
        training.log.image("pictures", _brightened(pictures.float()))
        training.log.table("predictions", ["picture", "class", "predicted", "probability"], rows)


def _brightened(pictures: Tensor) -> Tensor:
    """Stretch pictures to the range from 0 to 1, whatever normalization they have; as many channels as a file takes."""
    low, high = pictures.amin((1, 2, 3), keepdim=True), pictures.amax((1, 2, 3), keepdim=True)
    shown = (pictures - low) / (high - low).clamp(min=1e-12)
    return shown if shown.shape[1] in (1, 3, 4) else shown[:, :1]
