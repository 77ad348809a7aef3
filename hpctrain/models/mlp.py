"""A multilayer perceptron."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn


class MLP(nn.Module):
    """Linear layers with ReLU between them, over flattened inputs.

    Args:
        in_features: values per sample.
        width: of the hidden layers.
        num_layers: linear layers, the last one included.
        num_classes: number of logits.
        dropout: probability of dropping a hidden value.
    """

    def __init__(
        self, in_features: int = 64, width: int = 64, num_layers: int = 2, num_classes: int = 10, dropout: float = 0.0
    ) -> None:
        super().__init__()
        sizes = [in_features, *[width] * (num_layers - 1)]
        hidden = [
            layer
            for inputs, outputs in pairwise(sizes)
            for layer in (nn.Linear(inputs, outputs), nn.ReLU(), nn.Dropout(dropout))
        ]
        self.layers = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(sizes[-1], num_classes))

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits [n, num_classes] of inputs [n, ...]."""
        logits: Tensor = self.layers(inputs)
        return logits

    def pipeline_plan(self) -> list[str]:
        """Return the modules between which the model may be cut into stages (`parallel.pipeline_degree`)."""
        return ["layers.*"]
