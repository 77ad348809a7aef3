"""A small convolutional network."""

from __future__ import annotations

from torch import Tensor, nn


class ConvNet(nn.Module):
    """Three convolutions with batch norm, a mean over the image, and a linear layer.

    Args:
        width: channels of the first convolution; the others have twice as many.
        dropout: probability of dropping a feature before the linear layer.
        num_classes: number of logits.
        in_channels: channels of the images.
    """

    def __init__(self, width: int = 32, dropout: float = 0.0, num_classes: int = 10, in_channels: int = 1) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *_convolution(in_channels, width),
            *_convolution(width, 2 * width),
            nn.MaxPool2d(2),
            *_convolution(2 * width, 2 * width),
        )
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(2 * width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [n, num_classes] of images [n, in_channels, height, width], 2 x 2 pixels or more."""
        features: Tensor = self.features(images)
        if not self.classifier:
            # a later stage of the model has it
            return features
        logits: Tensor = self.classifier(self.dropout(features.mean(dim=(2, 3))))
        return logits

    def pipeline_plan(self) -> list[str | tuple[str, ...]]:
        """Return the modules between which the model may be cut into stages (`parallel.pipeline_degree`)."""
        return ["features.*", ("dropout", "classifier")]


def _convolution(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
