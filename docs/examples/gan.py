"""A GAN: two networks, two losses, two optimizers, which step in turn."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpctrain.tasks import Sums
from hpctrain.tasks.digits import Digits


class Networks(nn.Module):
    """A generator of digits, 8 x 8 pixels, and a discriminator."""

    def __init__(self, latent: int, width: int) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(latent, width * 4),
            nn.Unflatten(1, (width, 2, 2)),
            nn.ReLU(),
            nn.ConvTranspose2d(width, width, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(width, 1, 4, stride=2, padding=1),
        )
        self.discriminator = nn.Sequential(
            nn.Conv2d(1, width, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, width, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(width * 4, 1),
        )


class Gan(Digits):
    """Draw digits that a discriminator takes for real ones (Goodfellow et al., 2014).

    The configuration gives each network an optimizer, and names the loss for which it steps. In a turn, only that
    turn's parameters require gradients: nothing has to be detached.

    Args:
        latent: numbers from which an image is drawn.
        width: channels of both networks.
    """

    metric, metric_mode = "fooled", "max"

    def __init__(self, latent: int = 32, width: int = 64) -> None:
        super().__init__()
        self.latent, self.width = latent, width

    def build_model(self) -> nn.Module:
        return Networks(self.latent, self.width)

    def discriminator_loss(self, model: Any, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        real, _ = batch
        fake = model.generator(torch.randn(len(real), self.latent, device=real.device))
        of_real, of_fake = model.discriminator(torch.cat([real, fake])).chunk(2)
        loss = F.softplus(-of_real).mean() + F.softplus(of_fake).mean()
        return {"loss": loss, "real_accepted": (of_real > 0).float().mean()}

    def loss(self, model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The generator's."""
        real, _ = batch
        fake = model.generator(torch.randn(len(real), self.latent, device=real.device))
        return F.softplus(-model.discriminator(fake)).mean()

    def evaluate(self, model: Any, batch: tuple[Tensor, Tensor]) -> Sums:
        real, _ = batch
        # the same noise in each evaluation, so that pictures can be compared
        noise = torch.randn(len(real), self.latent, generator=torch.Generator().manual_seed(0)).to(real.device)
        fake = model.generator(noise)
        self.log.image("drawn", fake[:32] / 5 + 0.5)
        fooled, loss = (model.discriminator(fake) > 0).sum(), F.softplus(-model.discriminator(fake)).sum()
        return {"fooled": (fooled, len(real)), "loss": (loss, len(real))}
