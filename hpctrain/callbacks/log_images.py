"""Log held-out images with the classes that a model predicts for them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from hpctrain.callbacks.callback import Callback
from hpctrain.callbacks.training import Training
from hpctrain.errors import TaskError


class LogImages(Callback):
    """Logs the first held-out images, and a table of their classes and the predicted ones.

    For tasks whose batches are images of shape [n, C, H, W] and class numbers of shape [n], and whose model returns
    logits of shape [n, num_classes].

    Args:
        num_images: how many, from the first one on.
    """

    def __init__(self, num_images: int = 16) -> None:
        self.num_images = num_images

    def after_evaluation(self, training: Training, metrics: Mapping[str, float]) -> None:  # noqa: ARG002 - of the hook
        """Predict on rank zero, or on all ranks that share the model, and log on rank zero."""
        if not training.takes_part or (batch := training.eval_samples(self.num_images)) is None:
            return
        if not isinstance(batch, list | tuple) or len(batch) != 2 or batch[0].ndim != 4 or batch[1].ndim != 1:
            raise TaskError(
                "log_images expects the task's batches to be (images [n, C, H, W], class numbers [n]): leave it out of "
                "callbacks, or write a callback of your own"
            )
        images, classes = batch
        with training.evaluation_mode():
            probabilities = training.model(images).float().softmax(1).cpu()
        if training.rank:
            return
        confidence, predicted = probabilities.max(1)
        rows = zip(range(len(classes)), classes.tolist(), predicted.tolist(), confidence.tolist(), strict=True)
        training.log.image("images", _stretch_contrast(images.float()))
        training.log.table("predictions", ["image", "class", "predicted", "probability"], rows)


def _stretch_contrast(images: Tensor) -> Tensor:
    """Stretch images to the range from 0 to 1, whatever normalization they have; as many channels as a file takes."""
    low, high = images.amin((1, 2, 3), keepdim=True), images.amax((1, 2, 3), keepdim=True)
    stretched = (images - low) / (high - low).clamp(min=1e-12)
    return stretched if stretched.shape[1] in (1, 3, 4) else stretched[:, :1]
