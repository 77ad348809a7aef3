"""Classification of images in one folder per class."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # its usual name
from torch.utils.data import Dataset

from hpctrain.errors import ConfigError, TaskError
from hpctrain.models.resnet import ResNet
from hpctrain.tasks.task import Sums, Task, classification_sums

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")


class ImageList:
    """Paths and labels, in an order that depends only on the names: classes sorted, then files sorted.

    Args:
        folder: holds one folder per class, with images at any depth; names that begin with a dot are ignored.
        classes: names of the classes in the order of their labels; None: those of the folder, sorted.

    Attributes:
        classes: names of the classes; a label is an index into them.
        labels: int64 of shape [num_images].

    Raises:
        ConfigError: the folder doesn't exist or has no class, or a class has no images or isn't in ``classes``.
    """

    def __init__(self, folder: Path, classes: Sequence[str] | None = None) -> None:
        self._folder = folder
        class_names = _class_names(folder)
        self.classes = tuple(class_names if classes is None else classes)
        # arrays, not a list of strings: reading a string changes its reference count, so a million of them would be
        # copied page by page into every DataLoader worker
        names = bytearray()
        labels: list[int] = []
        ends = [0]
        for name in class_names:
            if name not in self.classes:
                class_range = f"{len(self.classes)} classes, from {self.classes[0]} to {self.classes[-1]}"
                problem = f"the class {name} isn't among those of the training images ({class_range})"
                raise ConfigError("task.data", folder, problem, "remove its folder, or add it to the training images")
            label, before = self.classes.index(name), len(labels)
            for path in _images(folder / name):
                names += os.fsencode(f"{name}/{path}")
                ends.append(len(names))
                labels.append(label)
            if len(labels) == before:
                problem = f"the class {name} has no image ({', '.join(SUFFIXES)})"
                raise ConfigError("task.data", folder, problem, "add images to its folder, or remove it")
        self._names = np.frombuffer(names, np.uint8)
        self._ends = np.array(ends)
        self.labels = np.array(labels)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[str, int]:
        """Path and label of an image."""
        name = os.fsdecode(self._names[self._ends[index] : self._ends[index + 1]].tobytes())
        return os.path.join(self._folder, name), int(self.labels[index])  # noqa: PTH118 - a tenth of a Path's time


def _class_names(folder: Path) -> list[str]:
    if not folder.is_dir():
        remedy = "set task.data to the folder that contains it, task.train and task.eval to its name there"
        raise ConfigError("task.data", folder, "is not a folder", remedy)
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise ConfigError("task.data", folder, "contains no folders", "make one folder per class")
    return names


def _images(folder: Path) -> Iterator[str]:
    for place, inside, files in os.walk(folder, followlinks=True):
        inside[:] = sorted(name for name in inside if not name.startswith("."))
        relative = os.path.relpath(place, folder)
        for name in sorted(files):
            if name.lower().endswith(SUFFIXES) and not name.startswith("."):
                yield name if relative == "." else f"{relative}/{name}"


Box = tuple[int, int, int, int]

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of ImageNet's training images, per channel, as shares of full brightness."""
ASPECTS = math.log(3 / 4), math.log(4 / 3)
"""Logarithms of the smallest and largest ratio of width to height that a random crop may have."""


@dataclass(eq=False)
class ImageFolder(Task):
    """Classify images in DATA/train/CLASS/*.jpg and DATA/val/CLASS/*.jpg, the usual layout of ImageNet.

    A sample is an image, uint8 [3, image_size, image_size], and its label, int64: the index of its class among the
    sorted names of the training folder. Training images are cropped at random and resized (Szegedy et al., 2014), then
    flipped, as in torchvision; evaluation resizes and takes the centre. They are normalised to float32 on the model's
    device, so that a DataLoader worker sends a quarter of the bytes.

    Args:
        data: folder of the data set.
        train: its folder with the training images.
        eval: its folder with the held-out images; None for no evaluation.
        num_classes: number of the model's logits; None skips the check.
        image_size: pixels per side of the model's input.
        min_crop: smallest share of a training image's area that a random crop keeps.
        crop_share: share of the resized image's shorter side that evaluation's centre crop keeps.
        flip: probability that a training image is mirrored.
        label_smoothing: share of the training target that is spread over all classes.
        mean: subtracted, per channel; a share of full brightness.
        deviation: the divisor, per channel; a share of full brightness.

    Raises:
        ConfigError: the folders can't be used (see `ImageList`), or have more classes than the model has logits.
    """

    metric = "accuracy"
    metric_mode = "max"

    data: str
    train: str = "train"
    eval: str | None = "val"
    _: KW_ONLY
    num_classes: int | None = None
    image_size: int = 224
    min_crop: float = 0.08
    crop_share: float = 0.875
    flip: float = 0.5
    label_smoothing: float = 0.0
    mean: tuple[float, float, float] = MEAN
    deviation: tuple[float, float, float] = DEVIATION

    def __post_init__(self) -> None:
        deviations = torch.tensor(self.deviation).reshape(1, 3, 1, 1)
        self._scale = 1 / (255 * deviations)
        self._shift = -torch.tensor(self.mean).reshape(1, 3, 1, 1) / deviations

    def build_model(self) -> nn.Module:
        """A ResNet-50 for the classes of the training folder."""
        return ResNet(50, num_classes=len(self._train_images.classes))

    def train_dataset(self) -> Dataset[Any]:
        """See `Task`."""
        crop = partial(crop_at_random, size=self.image_size, min_crop=self.min_crop, flip=self.flip)
        return _Images(self._train_images, crop, draws_per_sample=True)

    def eval_dataset(self) -> Dataset[Any] | None:
        """See `Task`."""
        if self.eval is None:
            return None
        images = ImageList(Path(self.data) / self.eval, self._train_images.classes)
        crop = partial(crop_centre, size=self.image_size, shorter_side=round(self.image_size / self.crop_share))
        return _Images(images, crop, draws_per_sample=False)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross-entropy, with smoothed labels."""
        images, labels = batch
        return F.cross_entropy(model(self._normalise(images)), labels, label_smoothing=self.label_smoothing)

    def evaluate(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        """Cross-entropy and accuracy; with ten classes or more also the top-5 accuracy."""
        images, labels = batch
        logits = model(self._normalise(images))
        sums = classification_sums(logits, labels)
        # with fewer classes, five guesses are too many to be informative
        if logits.shape[1] >= 10:
            sums["top5_accuracy"] = (logits.topk(5).indices == labels[:, None]).sum(), len(labels)
        return sums

    @cached_property
    def _train_images(self) -> ImageList:
        folder = Path(self.data) / self.train
        images = ImageList(folder)
        num_classes = len(images.classes)
        if self.num_classes is not None and self.num_classes < num_classes:
            problem = f"{folder} has {num_classes} classes"
            raise ConfigError("model.num_classes", self.num_classes, problem, f"set model.num_classes={num_classes}")
        return images

    def _normalise(self, images: Tensor) -> Tensor:
        if self._scale.device != images.device:
            # cached: a copy in every step would wait for the device
            self._scale = self._scale.to(images.device)
            self._shift = self._shift.to(images.device)
        return images.float().mul_(self._scale).add_(self._shift)


class _Images(Dataset[Any]):
    def __init__(
        self, images: ImageList, transform: Callable[[Image.Image], Image.Image], *, draws_per_sample: bool
    ) -> None:
        self.draws_per_sample = draws_per_sample
        self._images = images
        self._transform = transform

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self._images[index]
        # not `asarray`: Pillow's own memory is read-only, and torch warns about that
        pixels = np.array(self._transform(decode(path)))
        return torch.from_numpy(pixels).permute(2, 0, 1), label


def decode(path: str) -> Image.Image:
    """Read an image file, as RGB.

    Raises:
        TaskError: it can't be read.
    """
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except Exception as error:  # Pillow's decoders raise many kinds
        raise TaskError(
            f"{path} can't be read as an image ({type(error).__name__}: {error}): replace or remove it"
        ) from error


def crop_at_random(image: Image.Image, *, size: int, min_crop: float, flip: float) -> Image.Image:
    """A random part of a training image, resized to a square and perhaps mirrored; see `ImageFolder`."""
    box = random_box(image.width, image.height, min_crop)
    image = image.resize((size, size), Image.Resampling.BILINEAR, box)
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if random.random() < flip else image


def crop_centre(image: Image.Image, *, size: int, shorter_side: int) -> Image.Image:
    """The central square of an image whose shorter side is resized first."""
    shorter = min(image.size)
    width, height = (shorter_side * side // shorter for side in image.size)
    left, top = round((width - size) / 2), round((height - size) / 2)
    resized = image.resize((width, height), Image.Resampling.BILINEAR)
    return resized.crop((left, top, left + size, top + size))


def random_box(width: int, height: int, min_share: float) -> Box:
    """Left, top, right and bottom of a random crop, drawn from the global generator of `random`.

    Its area is uniform in [min_share, 1] of the image's, its aspect ratio log-uniform in [3/4, 4/3]; after ten draws
    that don't fit, it is the largest centred box of such a ratio (Szegedy et al., 2014; torchvision's
    RandomResizedCrop).
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
