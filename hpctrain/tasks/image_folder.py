"""Images in a folder per class."""

from __future__ import annotations

import math
import random
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # its usual name
from torch.utils.data import Dataset

from hpctrain.errors import ConfigError, TaskError
from hpctrain.models.resnet import ResNet
from hpctrain.tasks.image_list import ImageList
from hpctrain.tasks.task import Sums, Task

try:
    from PIL import Image
except ModuleNotFoundError as missing:
    raise ConfigError(
        "task", "image_folder", "needs Pillow, which isn't installed", 'pip install "hpctrain[images]"'
    ) from missing

Box = tuple[int, int, int, int]

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet's training images, per channel, as shares of full brightness."""
ASPECTS = math.log(3 / 4), math.log(4 / 3)
"""Logarithms of the widths over heights that a random crop may have."""


class ImageFolder(Task):
    """Classify images that lie as DATA/train/CLASS/*.jpg and DATA/val/CLASS/*.jpg; ImageNet's usual layout.

    A sample is an image, uint8 [3, image_size, image_size], and its label, int64: the place of its class among the
    sorted names of the training folder. Training images are cropped at random and resized (Szegedy et al., 2014),
    then flipped, as torchvision does it; evaluation resizes and takes the centre. The model gets them normalised,
    float32, which is done on its device: a loading process hands over a quarter of the bytes.

    Args:
        data: the folder of the data set.
        train: the folder in it with the training images.
        eval: the folder in it with the held-out images; None for no evaluation.
        num_classes: logits of the model; None: not checked.
        image_size: pixels per side that the model gets.
        min_crop: smallest share of a training image's area that a random crop keeps.
        crop_share: share of the resized image's shorter side that evaluation's centre crop keeps.
        flip: probability that a training image is mirrored.
        label_smoothing: share of the training target that is spread over all classes.
        mean: per channel, subtracted; a share of full brightness.
        deviation: per channel, divided by.

    Raises:
        ConfigError: the folders can't be used (see `ImageList`), or hold more classes than the model tells apart.
    """

    metric = "accuracy"
    metric_mode = "max"

    def __init__(
        self,
        data: str,
        train: str = "train",
        eval: str | None = "val",  # noqa: A002 - named as in the configuration
        *,
        num_classes: int | None = None,
        image_size: int = 224,
        min_crop: float = 0.08,
        crop_share: float = 0.875,
        flip: float = 0.5,
        label_smoothing: float = 0.0,
        mean: tuple[float, float, float] = MEAN,
        deviation: tuple[float, float, float] = DEVIATION,
    ) -> None:
        self._train_folder, self._eval_folder = Path(data) / train, None if eval is None else Path(data) / eval
        self._num_classes, self._image_size = num_classes, image_size
        self._min_crop, self._crop_share, self._flip = min_crop, crop_share, flip
        self._label_smoothing = label_smoothing
        deviations = torch.tensor(deviation).reshape(1, 3, 1, 1)
        self._scale, self._shift = 1 / (255 * deviations), -torch.tensor(mean).reshape(1, 3, 1, 1) / deviations

    def build_model(self) -> nn.Module:
        """A ResNet-50 for the classes of the training folder."""
        return ResNet(50, num_classes=len(self._train_images.classes))

    def train_dataset(self) -> Dataset[Any]:
        """See `Task`."""
        return _Cropped(self._train_images, self._image_size, self._min_crop, self._flip)

    def eval_dataset(self) -> Dataset[Any] | None:
        """See `Task`."""
        if self._eval_folder is None:
            return None
        images = ImageList(self._eval_folder, self._train_images.classes)
        return _Centred(images, self._image_size, round(self._image_size / self._crop_share))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross-entropy, with smoothed labels."""
        images, labels = batch
        return F.cross_entropy(model(self._normalised(images)), labels, label_smoothing=self._label_smoothing)

    def evaluate(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        """Cross-entropy and accuracy; from ten classes on also how often the right one is among the five likeliest."""
        images, labels = batch
        logits, count = model(self._normalised(images)), len(labels)
        sums: Sums = {
            "loss": (F.cross_entropy(logits, labels, reduction="sum"), count),
            "accuracy": ((logits.argmax(1) == labels).sum(), count),
        }
        if logits.shape[1] >= 10:
            sums["top5_accuracy"] = (logits.topk(5).indices == labels[:, None]).sum(), count
        return sums

    @cached_property
    def _train_images(self) -> ImageList:
        images = ImageList(self._train_folder)
        found = len(images.classes)
        if self._num_classes is not None and self._num_classes < found:
            problem = f"{self._train_folder} has {found} classes"
            raise ConfigError("model.num_classes", self._num_classes, problem, f"set model.num_classes={found}")
        return images

    def _normalised(self, images: Tensor) -> Tensor:
        if self._scale.device != images.device:
            # once: a copy in every step would wait for the device
            self._scale, self._shift = self._scale.to(images.device), self._shift.to(images.device)
        return images.float().mul_(self._scale).add_(self._shift)


class _Cropped(Dataset[Any]):
    draws_per_sample = True

    def __init__(self, images: ImageList, size: int, min_crop: float, flip: float) -> None:
        self._images, self._size, self._min_crop, self._flip = images, size, min_crop, flip

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self._images[index]
        image = decode(path)
        box = random_box(image.width, image.height, self._min_crop)
        image = image.resize((self._size, self._size), Image.Resampling.BILINEAR, box)
        if random.random() < self._flip:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return _tensor(image), label


class _Centred(Dataset[Any]):
    draws_per_sample = False

    def __init__(self, images: ImageList, size: int, shorter_side: int) -> None:
        self._images, self._size, self._shorter_side = images, size, shorter_side

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self._images[index]
        image = decode(path)
        shorter = min(image.size)
        width, height = (self._shorter_side * side // shorter for side in image.size)
        left, top = round((width - self._size) / 2), round((height - self._size) / 2)
        resized = image.resize((width, height), Image.Resampling.BILINEAR)
        return _tensor(resized.crop((left, top, left + self._size, top + self._size))), label


def decode(path: str) -> Image.Image:
    """The image in a file, as RGB.

    Raises:
        TaskError: it can't be read; the file is named.
    """
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except Exception as error:  # decoders raise what they like
        raise TaskError(
            f"{path} can't be read as an image ({type(error).__name__}: {error}): replace or remove it"
        ) from error


def random_box(width: int, height: int, min_share: float) -> Box:
    """Left, top, right and bottom of a random crop, drawn from the global generator of `random`.

    Area uniform in [min_share, 1] of the image's, aspect ratio log-uniform in [3/4, 4/3]; after ten draws that don't
    fit, the largest centred box of such a ratio (Szegedy et al., 2014; torchvision's RandomResizedCrop).
    """
    for _ in range(10):
        area = width * height * random.uniform(min_share, 1)
        aspect = math.exp(random.uniform(*ASPECTS))
        wide, high = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < wide <= width and 0 < high <= height:
            left, top = random.randint(0, width - wide), random.randint(0, height - high)
            return left, top, left + wide, top + high
    wide, high = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    left, top = (width - wide) // 2, (height - high) // 2
    return left, top, left + wide, top + high


def _tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)
