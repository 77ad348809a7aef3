"""A Keras 3 model of your own, with the data, the loss and the metrics of torch."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from hpctrain.models.keras_module import KerasModule, import_keras
from hpctrain.tasks import classification_sums
from hpctrain.tasks.digits import Digits

keras = import_keras()
layers = keras.layers


class KerasDigits(Digits):
    """Recognise digits with a dense network, which Keras builds.

    Args:
        width: of the hidden layers.
        dropout: probability.
        weight_penalty: strength of the L2 penalty on the kernels, which Keras computes.
    """

    def __init__(self, width: int = 128, dropout: float = 0.2, weight_penalty: float = 1e-4) -> None:
        super().__init__()
        self.width, self.dropout, self.weight_penalty = width, dropout, weight_penalty

    def build_model(self) -> nn.Module:
        return KerasModule(self.network)

    def network(self) -> Any:
        hidden = [
            layer
            for _ in range(2)
            for layer in (
                layers.Dense(self.width, kernel_regularizer=keras.regularizers.L2(self.weight_penalty)),
                layers.BatchNormalization(),
                layers.ReLU(),
                layers.Dropout(self.dropout),
            )
        ]
        return keras.Sequential([keras.Input((1, 8, 8)), layers.Flatten(), *hidden, layers.Dense(10)])

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        logits, penalty = model(images)
        return F.cross_entropy(logits, labels) + penalty

    def evaluate(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Any:
        images, labels = batch
        logits, _ = model(images)
        return classification_sums(logits, labels)
