"""A point-cloud model: samples of different sizes, with a collate function of one's own."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from hpctrain.tasks import Sums, Task, classification_sums
from hpctrain.tasks.digits import read_digits

Batch = dict[str, Tensor]


class Clouds(Dataset[tuple[Tensor, int]]):
    """Digits as clouds: a point, [x, y, ink], for each pixel that isn't empty."""

    draws_per_sample = False  # saves seeding the generators for each sample

    def __init__(self, table: Tensor) -> None:
        grid = torch.cartesian_prod(torch.arange(8.0), torch.arange(8.0)) / 4 - 1
        self.clouds = [torch.cat([grid, row[:64, None] / 16], dim=1)[row[:64] > 0] for row in table]
        self.labels = [int(row[64]) for row in table]

    def __len__(self) -> int:
        return len(self.clouds)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.clouds[index], self.labels[index]


class PointNet(nn.Module):
    """The same network for each point, the maximum over each cloud's points, and a classifier (Qi et al., 2017)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.points = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.clouds = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))

    def forward(self, points: Tensor, cloud: Tensor, num_clouds: int) -> Tensor:
        features = self.points(points)
        # features are positive after the ReLU, so zeros are no maximum
        rows = cloud[:, None].expand_as(features)
        largest = features.new_zeros(num_clouds, features.shape[1]).scatter_reduce(0, rows, features, "amax")
        return self.clouds(largest)


class PointClouds(Task):
    """Recognise digits by their points."""

    metric, metric_mode = "accuracy", "max"

    def __init__(self, width: int = 128) -> None:
        self.width = width

    def build_model(self) -> nn.Module:
        return PointNet(self.width)

    def train_dataset(self) -> Clouds:
        return Clouds(torch.from_numpy(read_digits()[:1437]))

    def eval_dataset(self) -> Clouds:
        return Clouds(torch.from_numpy(read_digits()[1437:]))

    def collate_fn(self, samples: list[tuple[Tensor, int]]) -> Batch:
        """Join the clouds of a batch into one list of points, each with the number of its cloud."""
        sizes = torch.tensor([len(points) for points, _ in samples])
        return {
            "points": torch.cat([points for points, _ in samples]),
            "cloud": torch.arange(len(samples)).repeat_interleave(sizes),
            "labels": torch.tensor([label for _, label in samples]),
        }

    def num_samples(self, batch: Batch) -> int:
        """Clouds, not points: hpctrain weights micro-batches and evaluations by them."""
        return len(batch["labels"])

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(self.logits(model, batch), batch["labels"])

    def evaluate(self, model: nn.Module, batch: Batch) -> Sums:
        return classification_sums(self.logits(model, batch), batch["labels"])

    @staticmethod
    def logits(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["points"], batch["cloud"], len(batch["labels"]))
