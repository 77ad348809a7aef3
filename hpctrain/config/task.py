"""``conf/task``: what is trained. A user's own task needs no schema: any ``_target_`` works. Owner: hpctrain.tasks."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.config import require
from hpctrain.errors import ConfigError

EXTRAS = {
    "hpctrain.tasks.digits": ("sklearn", "examples"),
    "hpctrain.tasks.image_folder": ("PIL", "images"),
    "hpctrain.tasks.keras_digits": ("keras", "keras"),
}
"""Module of a task -> package that it imports beyond hpctrain's own, and the extra that brings it."""


READ_A_FOLDER = ("hpctrain.tasks.image_folder.ImageFolder", "hpctrain.tasks.tokens.Tokens")
"""Tasks that can't begin without the folder task.data."""


def missing_folder(node: Mapping[str, Any]) -> Path | None:
    """The folder that a task reads, where this machine doesn't have it; nodes of a cluster may have another disk."""
    if node["_target_"] not in READ_A_FOLDER:
        return None
    folder = Path(str(node["data"]))
    return None if folder.is_dir() else folder


def refuse_without_extra(
    node: Mapping[str, Any], find: Callable[[str], object | None] = importlib.util.find_spec
) -> None:
    """Refuse a task whose package isn't installed; nothing is imported.

    Args:
        node: of the task.
        find: looks for a package by name; None where there is none.

    Raises:
        ConfigError: names the extra that brings it.
    """
    target = str(node["_target_"])
    package, extra = EXTRAS.get(target.rpartition(".")[0], (None, ""))
    if package is not None and find(package) is None:
        remedy = f'pip install "hpctrain[{extra}]"'
        raise ConfigError("task._target_", target, f"needs the package {package}, which isn't installed", remedy)


@dataclass(kw_only=True, slots=True)
class Digits:
    """scikit-learn's handwritten digits, 8 x 8 pixels, ten classes."""

    _target_: str = "hpctrain.tasks.digits.Digits"
    """The class that is built."""
    held_out: float = 0.2
    """Share of the samples that is kept for evaluation."""
    augment: bool = False
    """Shift each training picture by up to a pixel, drawn from seed, epoch and sample."""

    def __post_init__(self) -> None:
        """Check single values."""
        require.between("task.held_out", self.held_out, 0.01, 0.9)


@dataclass(kw_only=True, slots=True)
class Text:
    """Bytes of the English text in Python's own `pydoc_data.topics`, to be continued."""

    _target_: str = "hpctrain.tasks.text.Text"
    """The class that is built."""
    context_length: int = 128
    """Bytes that one sample holds."""
    held_out: float = 0.1
    """Share of the text that is kept for evaluation."""

    def __post_init__(self) -> None:
        """Check single values."""
        require.at_least("task.context_length", self.context_length, 2)
        require.between("task.held_out", self.held_out, 0.01, 0.9)


@dataclass(kw_only=True, slots=True)
class ImageFolder:
    """Pictures in DATA/train/CLASS and DATA/val/CLASS, ImageNet's usual layout. Needs `hpctrain[images]`."""

    _target_: str = "hpctrain.tasks.image_folder.ImageFolder"
    """The class that is built."""
    data: str = "???"
    """Folder of the data set."""
    train: str = "train"
    """Folder in it with the training pictures, a folder per class."""
    eval: str | None = "val"
    """Folder in it with the held-out pictures; null: no evaluation."""
    num_classes: int | None = None
    """Classes that the model tells apart, for a check; conf/task takes them from the model."""
    image_size: int = 224
    """Pixels per side that the model gets."""
    min_crop: float = 0.08
    """Smallest share of a training picture's area that a random crop keeps."""
    crop_share: float = 0.875
    """Share of the resized picture's shorter side that evaluation's centre crop keeps."""
    flip: float = 0.5
    """Probability that a training picture is mirrored."""
    label_smoothing: float = 0.0
    """Share of the training target that is spread over all classes."""
    mean: list[float] = field(default_factory=lambda: [0.485, 0.456, 0.406])
    """Per channel, subtracted; a share of full brightness."""
    deviation: list[float] = field(default_factory=lambda: [0.229, 0.224, 0.225])
    """Per channel, divided by."""

    def __post_init__(self) -> None:
        """Check single values."""
        require.at_least("task.num_classes", self.num_classes, 2)
        require.at_least("task.image_size", self.image_size, 1)
        require.between("task.min_crop", self.min_crop, 0.001, 1)
        require.between("task.crop_share", self.crop_share, 0.1, 1)
        require.between("task.flip", self.flip, 0, 1)
        require.between("task.label_smoothing", self.label_smoothing, 0, 1)
        for key, values in (("mean", self.mean), ("deviation", self.deviation)):
            if len(values) != 3:
                raise ConfigError(f"task.{key}", values, "needs a number per channel", "give it three")
        for deviation in self.deviation:
            require.above("task.deviation", deviation, 0)


@dataclass(kw_only=True, slots=True)
class Tokens:
    """Token files on disk, to be continued: language models at any size. `hpctrain.tasks.make_tokens` makes them."""

    _target_: str = "hpctrain.tasks.tokens.Tokens"
    """The class that is built."""
    data: str = "???"
    """Folder of the token files."""
    train: str = "train*"
    """Name, or pattern with * and ?, of its training files: .bin (bare numbers) or .npy."""
    eval: str | None = "eval*"
    """The same for the held-out files; null: no evaluation."""
    dtype: str | None = None
    """Numbers in .bin files: `uint16` or `uint32`, little-endian; null: what tokens.json beside them says."""
    context_length: int = 1024
    """Tokens that one sample holds."""
    vocab_size: int | None = None
    """Tokens that the model tells apart, for a check; conf/task takes them from the model."""

    def __post_init__(self) -> None:
        """Check single values."""
        require.at_least("task.context_length", self.context_length, 1)
        require.at_least("task.vocab_size", self.vocab_size, 1)
        if self.dtype is not None:
            require.one_of("task.dtype", self.dtype, ("uint16", "uint32"))


@dataclass(kw_only=True, slots=True)
class Keras:
    """A Keras 3 model on the torch backend: the convnet of Keras's guide, on the digits. Needs `hpctrain[keras]`."""

    _target_: str = "hpctrain.tasks.keras_digits.KerasDigits"
    """The class that is built."""
    held_out: float = 0.2
    """Share of the samples that is kept for evaluation."""
    augment: bool = False
    """Shift each training picture by up to a pixel, drawn from seed, epoch and sample."""
    dropout: float = 0.5
    """Share of the features that is dropped before the last layer."""
    weight_penalty: float = 0.0
    """Strength of the L2 penalty on the kernels of the convolutions; Keras adds it to the loss."""

    def __post_init__(self) -> None:
        """Check single values."""
        require.between("task.held_out", self.held_out, 0.01, 0.9)
        require.between("task.dropout", self.dropout, 0, 1)
        require.at_least("task.weight_penalty", self.weight_penalty, 0)
