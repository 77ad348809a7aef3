"""Fine-tuning: a backbone from another run, frozen in part, unfrozen in part, and a new head."""

from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from hpctrain.models.convnet import ConvNet
from hpctrain.tasks.digits import Digits


class Parity(Digits):
    """Tell odd digits from even ones, with few labels: the backbone comes from a run that recognised digits.

    Args:
        num_labels: number of training samples.
        width: of the backbone.
    """

    def __init__(self, num_labels: int = 256, width: int = 32) -> None:
        super().__init__()
        self.num_labels, self.width = num_labels, width

    def build_model(self) -> nn.Module:
        model = ConvNet(width=self.width, num_classes=2)
        # modules keep the mode in which they are returned: the frozen batch norm keeps the statistics that it was given
        model.features[:3].eval()
        return model

    def train_dataset(self) -> Dataset[Any]:
        return Subset(super().train_dataset(), range(self.num_labels))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, digits = batch
        return super().loss(model, (images, digits % 2))

    def evaluate(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Any:
        images, digits = batch
        return super().evaluate(model, (images, digits % 2))
