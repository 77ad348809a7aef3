"""Contrastive learning: the negatives of a sample are the samples of all ranks."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpctrain.models.convnet import ConvNet
from hpctrain.parallel.all_gather import all_gather_with_grad
from hpctrain.tasks import Sums
from hpctrain.tasks.digits import Digits


class Contrastive(Digits):
    """Learn a representation from two views of each image (SimCLR: Chen et al., 2020), without labels.

    A sample's negatives are all other samples of the micro-batches of all ranks. Set the micro-batch size so that there
    is no accumulation: a step with accumulation has fewer negatives.

    Args:
        dimensions: of the representation.
        temperature: of the similarities.
        noise: deviation of what is added to the pixels of each view.
    """

    metric, metric_mode = "loss", "min"

    def __init__(self, dimensions: int = 32, temperature: float = 0.2, noise: float = 0.3) -> None:
        super().__init__()
        self.dimensions, self.temperature, self.noise = dimensions, temperature, noise

    def build_model(self) -> nn.Module:
        return ConvNet(num_classes=self.dimensions)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        first, second = self.two_views(model, batch[0])
        # one call for both views: each rank's rows are its first views, then its second ones
        everyone = all_gather_with_grad(torch.cat([first, second]))
        own = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        return self.nt_xent(torch.cat([first, second]), everyone, own * 2 * len(first))

    def evaluate(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        # without gathering: ranks don't evaluate equally many batches
        first, second = self.two_views(model, batch[0])
        both = torch.cat([first, second])
        nearest = (first @ second.T).argmax(dim=1)
        found = (nearest == torch.arange(len(first), device=first.device)).sum()
        return {"loss": (self.nt_xent(both, both, 0) * len(first), len(first)), "found": (found, len(first))}

    def two_views(self, model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
        views = [self.view(images), self.view(images)]
        first, second = F.normalize(model(torch.cat(views)), dim=1).chunk(2)
        return first, second

    def view(self, images: Tensor) -> Tensor:
        """Shift each image by at most a pixel, and add noise: on the model's device, from its random stream."""
        rows, columns = torch.randint(-1, 2, (2, len(images), 1), device=images.device)
        pixels = torch.arange(8, device=images.device)
        down, right = (rows + pixels) % 8, (columns + pixels) % 8
        of_sample = torch.arange(len(images), device=images.device)[:, None, None]
        shifted = images[of_sample, 0, down[:, :, None], right[:, None, :]][:, None]
        return shifted + self.noise * torch.randn_like(images)

    def nt_xent(self, own: Tensor, everyone: Tensor, start: int) -> Tensor:
        """Cross-entropy of finding the other view of each sample; `own` is in `everyone` from row `start` on."""
        rows = torch.arange(len(own), device=own.device)
        similarities = own @ everyone.T / self.temperature
        similarities[rows, start + rows] = float("-inf")  # a view isn't its own negative
        return F.cross_entropy(similarities, start + (rows + len(own) // 2) % len(own))
