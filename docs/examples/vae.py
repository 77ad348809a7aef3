"""A variational autoencoder: a loss of two parts, one of which fades in, and pictures that it draws."""

from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.tasks import Sums
from hpctrain.tasks.digits import Digits


class Autoencoder(nn.Module):
    """Encodes images of 8 x 8 pixels into a mean and a variance per latent value, and decodes them."""

    def __init__(self, latent: int, width: int) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.GELU(), nn.Linear(width, 2 * latent))
        self.decode = nn.Sequential(
            nn.Linear(latent, width), nn.GELU(), nn.Linear(width, 64), nn.Unflatten(1, (1, 8, 8))
        )

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encode(images).chunk(2, dim=1)
        noise = torch.randn_like(mean) if self.training else 0.0
        return self.decode(mean + noise * (log_variance / 2).exp()), mean, log_variance


class Vae(Digits):
    """Learn to draw digits (Kingma & Welling, 2014); the data is that of hpctrain's own task.

    Args:
        latent: values per image between encoder and decoder.
        width: of the hidden layers.
        beta: weight of the divergence, once it has faded in.
        fade_in: part of the run over which the weight grows from 0 to beta.
    """

    metric, metric_mode = "loss", "min"

    def __init__(self, latent: int = 8, width: int = 256, beta: float = 1.0, fade_in: float = 0.2) -> None:
        super().__init__()
        self.latent, self.width, self.beta, self.fade_in = latent, width, beta, fade_in

    def build_model(self) -> nn.Module:
        return Autoencoder(self.latent, self.width)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Any:
        images, _ = batch
        losses = self.parts(images, *model(images))
        weight = self.beta * min(1.0, self.position.progress / self.fade_in)
        return {"loss": losses["reconstruction"] + weight * losses["divergence"], **losses}

    def evaluate(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        images, _ = batch
        output, mean, log_variance = model(images)
        losses = self.parts(images, output, mean, log_variance)
        losses["loss"] = losses["reconstruction"] + self.beta * losses["divergence"]
        self.log.image("reconstructed", torch.stack([images[:8], output[:8]]).flatten(0, 1) / 5 + 0.5)
        return {name: (value * len(images), len(images)) for name, value in losses.items()}

    @staticmethod
    def parts(images: Tensor, output: Tensor, mean: Tensor, log_variance: Tensor) -> dict[str, Tensor]:
        squared_error = (output - images).square().sum(dim=(1, 2, 3))
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum(dim=1) / 2
        return {"reconstruction": squared_error.mean() / 2, "divergence": divergence.mean()}
