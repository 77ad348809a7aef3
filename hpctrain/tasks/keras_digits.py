"""Handwritten digits, classified by a Keras model."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # its usual name

from hpctrain.models.keras_module import KerasModule, import_keras
from hpctrain.tasks.digits import Digits
from hpctrain.tasks.task import Sums, classification_sums


class KerasDigits(Digits):
    """The digits of `Digits`, and the convnet of Keras's guide "Multi-GPU distributed training with PyTorch".

    Its three convolutions have batch norms, and dropout stands before the last layer; here it sees 8 x 8 pixels.

    Args:
        held_out: share of the digits that is held out for evaluation.
        augment: shift training images at random, by at most one pixel in each direction.
        dropout: probability of dropping a feature before the last layer.
        weight_penalty: strength of an L2 penalty on the convolutions' kernels, which Keras adds to the loss.

    Raises:
        ConfigError: see `Digits`.
    """

    def __init__(
        self, held_out: float = 0.2, augment: bool = False, dropout: float = 0.5, weight_penalty: float = 0.0
    ) -> None:
        super().__init__(held_out, augment)
        self._dropout = dropout
        self._weight_penalty = weight_penalty

    def build_model(self) -> nn.Module:
        """See `Task`.

        Raises:
            ConfigError: Keras isn't installed, or has another backend.
        """
        return KerasModule(self._convnet)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross-entropy, and the model's own losses."""
        images, labels = batch
        logits, own_losses = model(_channels_last(images))
        loss: Tensor = F.cross_entropy(logits, labels) + own_losses
        return loss

    def evaluate(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        """Cross-entropy and accuracy."""
        images, labels = batch
        logits, _ = model(_channels_last(images))
        return classification_sums(logits, labels)

    def _convnet(self) -> Any:
        keras = import_keras()
        layers = keras.layers
        penalty = keras.regularizers.L2(self._weight_penalty) if self._weight_penalty else None
        inputs = stream = keras.Input(shape=(8, 8, 1))
        for filters, size, strides, padding in ((12, 3, 1, "same"), (24, 6, 2, "valid"), (32, 6, 2, "same")):
            convolution = layers.Conv2D(
                filters,
                size,
                strides=strides,
                padding=padding,
                use_bias=False,
                kernel_regularizer=penalty,
                data_format="channels_last",  # the default depends on the user's keras.json
            )
            stream = convolution(stream)
            stream = layers.BatchNormalization(scale=False, center=True)(stream)
            stream = layers.ReLU()(stream)
        stream = layers.GlobalAveragePooling2D(data_format="channels_last")(stream)
        stream = layers.Dense(256, activation="relu")(stream)
        stream = layers.Dropout(self._dropout)(stream)
        return keras.Model(inputs, layers.Dense(10)(stream))


def _channels_last(images: Tensor) -> Tensor:
    return images.permute(0, 2, 3, 1)  # Keras expects channels last
