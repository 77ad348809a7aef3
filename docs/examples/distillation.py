"""Knowledge distillation: a small network learns from the output of a large one that another run trained."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpctrain.models.convnet import ConvNet
from hpctrain.tasks.digits import Digits


class Distillation(Digits):
    """Teach a small convnet with a large one's logits (Hinton et al., 2015).

    Args:
        teacher: a checkpoint's file of weights, RUN/checkpoints/step_.../model.pt.
        teacher_width: of the network that was saved there.
        width: of the network that learns.
        temperature: divides the logits, so that small probabilities count more.
        weight: of the teacher's output in the loss; the labels have the rest.
    """

    def __init__(
        self, teacher: str, teacher_width: int = 32, width: int = 4, temperature: float = 4.0, weight: float = 0.9
    ) -> None:
        super().__init__()
        self.teacher_path, self.teacher_width, self.width = Path(teacher).absolute(), teacher_width, width
        self.temperature, self.weight = temperature, weight

    def build_model(self) -> nn.Module:
        # The teacher is not part of the model: no checkpoint contains it, and DDP doesn't send it. It is loaded here,
        # and not in the first loss, because initialising it draws random numbers.
        self.teacher = ConvNet(width=self.teacher_width).requires_grad_(False).eval()
        self.teacher.load_state_dict(torch.load(self.teacher_path, weights_only=True))
        return ConvNet(width=self.width)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Any:
        images, labels = batch
        logits = model(images)
        with torch.no_grad():
            expected = self.teacher.to(images.device)(images)
        soft = F.kl_div(
            F.log_softmax(logits / self.temperature, dim=1),
            F.log_softmax(expected / self.temperature, dim=1),
            reduction="batchmean",
            log_target=True,
        )
        hard = F.cross_entropy(logits, labels)
        loss = self.weight * self.temperature**2 * soft + (1 - self.weight) * hard
        return {"loss": loss, "soft": soft, "hard": hard}
